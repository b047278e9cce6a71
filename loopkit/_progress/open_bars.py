"""The open bars, by number: functions that compiled loops, and loops in Python, call.

A program runs in the thread that called it, unless the runtime has one for it. Its loops are
nested, so the bars of a thread are a stack. Nobody inside a program learns that it has failed. So
its caller closes the bars that it left open. If the caller is not this library, the next bar of
that thread does."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from loopkit._progress.progress import ProgressSettings

INTERVAL = 0.2
"""Seconds from one update to the next, about. Each takes a loop of short steps a millisecond."""
SHARE, LONGEST = 100, 1.0
"""It is as many times longer as an update takes, up to so many seconds."""
UPDATES_FASTER = 8
"""The most by which the number of steps between two updates may grow from one to the next."""
NOT_YET = 2**31 - 1
SILENT = -1
"""The number of no bar: of all devices that run the same program, the first shows one."""

Run = tuple[int, int] | None
"""A call of a compiled program, by the frame that waits for it; None if it waits elsewhere."""


class Bar:
    def __init__(self, progress: ProgressSettings, total: int | None, backward: bool, lanes: int):
        self.progress, self.backward, self.lanes = progress, backward, lanes
        self.thread, self.due = threading.get_ident(), 1
        self.run: Run = None
        self.site: Any = None
        self.shown = progress.opened(total, backward)
        self.since = time.perf_counter()

    def show_lanes(self, done: int) -> None:
        if hasattr(self.shown, "lanes"):
            self.shown.lanes(done, self.lanes)

    def is_over(self, stack: set[Run]) -> bool:
        """Return whether its program has ended, if its thread is in these programs. A bar may wait
        for another."""
        return self.run is not None and self.progress.last and self.run not in stack

    def waits_for(self, progress: ProgressSettings, backward: bool) -> bool:
        """Return whether it was left open for such a loop."""
        if backward and self.progress.weight:  # each goes back for itself
            return False
        return self.backward == backward and progress.goes_on_with(self.progress)

    def update(self, steps: int, done: int, lanes: int) -> None:
        """Show an update. `done`: how many of the loop's lanes have stopped."""
        begin = time.perf_counter()
        if lanes:
            self.show_lanes(self.lanes - lanes + done)
        self.shown.update(steps)
        elapsed, self.since = max(begin - self.since, 1e-6), time.perf_counter()
        interval = min(max(INTERVAL, SHARE * (self.since - begin)), LONGEST)
        self.due = int(min(max(1, steps * min(interval / elapsed, UPDATES_FASTER)), NOT_YET))


_open: dict[int, Bar] = {}
_numbers = itertools.count(1)


def opened(
    progress: ProgressSettings,
    total: int | None,
    backward: bool = False,
    lanes: int = 0,
    site: object = None,
) -> int:
    """Open a bar and return its number. `site`: where a compiled program opens it."""
    with closing_if_it_fails():
        run, stack = _runs()
        _close(_left_open(site, run, stack))
        left = [item for item in _open_now() if item[1].waits_for(progress, backward)]
        if left:
            here = [item for item in _of_thread() if item in left]
            return (here or left)[-1][0]
        if progress.whole is not None and not backward:
            total = progress.whole
        bar = Bar(progress, total, backward, lanes)
        bar.site, bar.run = site, run
        number = next(_numbers) % NOT_YET
        _open[number] = bar
        return number


def updated(number: int, steps: int, done: int = 0, lanes: int = 0) -> int:
    """Update a bar, and return the number of steps to the next update."""
    bar = _open.get(number)
    if bar is not None and steps:
        with closing_if_it_fails(number):
            bar.update(steps, done, lanes)
    return NOT_YET if bar is None else bar.due


def closed(number: int, progress: ProgressSettings, backward: bool = False) -> None:
    """Close a bar after the last step of a loop, unless another goes on with it."""
    bar = _open.get(number)
    own = bar is not None and bar.progress == progress
    if (own and (backward or not progress.first)) or (progress.last and not backward):
        if bar is not None and bar.lanes:
            with closing_if_it_fails(number):
                bar.show_lanes(bar.lanes)
        _close([number])


@contextlib.contextmanager
def bar(progress: ProgressSettings | None, total: int | None) -> Generator[Callable[[int], Any]]:
    """Open a bar for a loop in Python, and yield a function that takes the number of steps
    taken."""
    if progress is None:
        yield lambda _: None
        return
    with closing_if_it_fails():
        number = opened(progress, total if total is None else total * progress.weight)
        yield lambda steps: updated(number, steps * progress.weight)
        closed(number, progress)


@contextlib.contextmanager
def in_parts(
    progress: ProgressSettings | None, total: int | None
) -> Generator[ProgressSettings | None]:
    """Give the loops inside one bar, and yield the settings with which they go on with it."""
    if progress is None:
        yield None
        return
    shown = replace(progress, whole=total, last=False)
    with closing_if_it_fails():
        number = opened(shown, total)
        yield shown.part(False, False)
        _close([number])


@contextlib.contextmanager
def closing_if_it_fails(number: int = SILENT) -> Generator[None, None, None]:
    """Close the bars that were opened inside, or by the calling program, if something fails."""
    run, _ = _runs()
    here = [n for n, bar in _of_thread() if run is not None and bar.run == run]
    before = [n for n, _ in _of_thread() if n not in here and n != number]
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to hear of
            _close([n for n, _ in _of_thread() if n not in before])
        raise


def _close(numbers: list[int]) -> None:
    closing = [_open.pop(number, None) for number in reversed(numbers)]
    for one in closing:
        if one is not None:
            one.shown.close()


def _open_now() -> list[tuple[int, Bar]]:
    return list(_open.items())


def _of_thread() -> list[tuple[int, Bar]]:
    here = threading.get_ident()
    return [(number, bar) for number, bar in _open_now() if bar.thread == here]


def _left_open(site: object, run: Run, stack: set[Run]) -> list[int]:
    """Return the bars of programs that have ended; a program that begins again counts as ended."""
    bars = [(number, bar) for number, bar in _of_thread() if bar.run is not None]
    over = [n for n, one in bars if one.is_over(stack)]
    again = [n for n, one in bars if one.site is site and (one.run == run or not one.progress.last)]
    return [n for n, _ in bars if n in over or (again and n >= again[0])]


def _runs() -> tuple[Run, set[Run]]:
    """Return the program that called, and all programs that this thread is in: their frames."""
    frame, names, places = sys._getframe(1), [], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    called = names.index(CALLED_BY) + 1 if CALLED_BY in names else len(names)
    return next(iter(places[called:]), None), set(places)


CALLED_BY = "_wrapped_callback"
"""The function of JAX that programs call."""
