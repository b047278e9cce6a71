"""Work in a child process, within a time of the processor."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

IDLE = 120
"""Seconds without a word from a child, of which it may also not have had the processor."""


class Outcome(NamedTuple):
    said: list[Any]
    seconds: float
    """Of the processor."""
    signal: int
    """That ended it, or 0."""


def allow(seconds: float) -> None:
    """From now on; then the process ends, whatever it does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def in_child(work: Callable[[], Iterator[Any]], idle: float = IDLE) -> Outcome:
    """What it yields, which JSON has to be able to write."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _speak(work, writer)
    os.close(writer)
    text = _listen(reader, child, idle)
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


def _listen(reader: int, child: int, idle: float) -> bytes:
    text = b""
    while True:
        if not select.select([reader], [], [], idle)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
            idle = 1e9
            continue
        more = os.read(reader, 1 << 20)
        if not more:
            os.close(reader)
            return text
        text += more
