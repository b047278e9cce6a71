"""Programs of two processes that `jax.distributed` connects, none of which outlives its test."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from multihost import free_port

ROOT = Path(__file__).parents[1]
LONGEST = 240
"""Seconds after which a test gives up waiting: many times what is needed."""


class Process(NamedTuple):
    running: subprocess.Popen
    log: Path

    def status(self) -> int:
        """Its status once it has ended."""
        return self.running.wait(timeout=LONGEST)

    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def program(folder: Path, *command: str, **settings: str) -> Iterator[Process]:
    """A process of Python in double precision, with one device, that is killed at the end."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    paths = [str(path) for path in (ROOT, ROOT / "examples", ROOT / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_ENABLE_X64": "1", **settings}
    env.pop("XLA_FLAGS", None)
    with log.open("w") as file:
        running = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own processes are killed with it
        )
    try:
        yield Process(running, log)
    finally:
        kill_all_of(running)


def kill_all_of(leader: subprocess.Popen) -> None:
    """The process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait(timeout=LONGEST)


@contextmanager
def pair(folder: Path, *command: str) -> Iterator[Sequence[Process]]:
    """Start a program twice, with the options of examples/multihost.py that tell the processes
    apart."""
    who = ["--processes", "2", "--coordinator", f"127.0.0.1:{free_port()}", "--process-id"]
    with program(folder, *command, *who, "0") as one, program(folder, *command, *who, "1") as two:
        yield one, two
