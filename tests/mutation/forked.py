"""Work in a child process, within a time of the processor."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOOKS, STILL = 10.0, 6
"""A child whose threads have all slept at so many looks, so many seconds apart, has hung."""


class Outcome(NamedTuple):
    said: list[Any]
    seconds: float
    """The seconds of the processor."""
    ended_by: int
    """The signal that did, or 0."""


def allow(seconds: float) -> None:
    """From now on; then the process ends, whatever it does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def in_child(work: Callable[[], Iterator[Any]]) -> Outcome:
    """Return what `work` yields, which JSON has to be able to write."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _speak(work, writer)
    os.close(writer)
    text = _listen(reader, child)
    _, status, usage = os.wait4(child, 0)
    said = [json.loads(line) for line in text.split(b"\n")[:-1]]
    code = os.waitstatus_to_exitcode(status)
    return Outcome(said, usage.ru_utime + usage.ru_stime, max(0, -code))


def _speak(work: Callable[[], Iterator[Any]], writer: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if "MUTATION_SHOWS" not in os.environ:
        os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for said in work():
            os.write(writer, json.dumps(said).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _listen(reader: int, child: int) -> bytes:
    """Until it ends. One that waits for nothing is ended; one that is kept waiting is not."""
    text, before, same = b"", None, 0
    while True:
        if not select.select([reader], [], [], LOOKS)[0]:
            now = _state(child)
            same = same + 1 if now == before and set(now[0]) == {"S"} else 0
            before = now
            if same == STILL:
                os.kill(child, signal.SIGKILL)
            continue
        more = os.read(reader, 1 << 20)
        if not more:
            os.close(reader)
            return text
        text += more


def _state(child: int) -> tuple[tuple[str, ...], int]:
    """Return the state of each thread of the child, and the processor time that it has had."""
    stats = [stat.read_text() for stat in Path(f"/proc/{child}/task").glob("*/stat")]
    fields = [stat.rpartition(")")[2].split() for stat in stats]
    return tuple(field[0] for field in fields), sum(int(f[11]) + int(f[12]) for f in fields)
