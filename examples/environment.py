"""Settings that a program must be started with: if they are missing, it starts itself anew."""

import os
import sys


def kept_memory() -> dict[str, str]:
    """Return settings with which the C library keeps memory once it is used.

    The C library hands the memory of large arrays back to the system. Each call then makes its
    results in new memory, and most of the time of a light computation goes into having the system
    map and clear its pages one after another.
    """
    wanted = ("arena_max=1", "mmap_max=0", "trim_threshold=10000000000")
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in wanted)}


def restart_with(settings: dict[str, str]) -> None:
    """Starts the program anew where these are not all set."""
    missing = {k: v for k, v in settings.items() if v not in os.environ.get(k, "")}
    if missing and sys.platform == "linux":
        for name, value in missing.items():
            between = ":" if name == "GLIBC_TUNABLES" else " "
            os.environ[name] = f"{os.environ.get(name, '')}{between}{value}".strip(between)
        os.execv(sys.executable, [sys.executable, *sys.argv])
