"""Small results that are worth keeping between processes, in files of the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def folder() -> Path:
    """$LOOPKIT_CACHE_DIR, or where the platform keeps what can be made again."""
    chosen = os.environ.get("LOOPKIT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "loopkit"


def digest(*parts: str) -> str:
    """A file name for what is known under these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load(name: str) -> Any:
    """What was stored under a name; None if nothing can be read."""
    try:
        return json.loads((folder() / f"{name}.json").read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
        return None


def store(name: str, value: Any) -> None:
    """Keep a value, whole or not at all; a folder that cannot be written to keeps nothing."""
    with contextlib.suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder(), suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(value, file)
            os.replace(path, folder() / f"{name}.json")
        except BaseException:
            os.unlink(path)
            raise
