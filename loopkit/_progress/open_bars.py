"""The open bars, by number, and the functions that compiled loops and loops in Python call.

A program runs in the thread that called it, unless the runtime has a thread for it. Its loops are
nested, so the bars of a thread are a stack. Code inside a program does not learn that the program
has failed, so its caller closes the bars that it left open. If the caller is not this library, the
next bar that opens in that thread closes them."""

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
"""The approximate seconds between updates. Each costs a loop of short steps a millisecond."""
SHARE, LONGEST = 100, 1.0
"""The interval is at least `SHARE` times the time of an update, but at most `LONGEST` seconds."""
UPDATES_FASTER = 8
"""The largest factor by which the number of steps between updates may grow at each update."""
NOT_YET = 2**31 - 1
SILENT = -1
"""The number that stands for no bar: of all devices that run a program, only the first has one."""

Run = tuple[int, int] | None
"""A call of a compiled program, named by the frame that waits for it; None if none here does."""


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
        """Return whether the bar's program has ended: its frame is not in the thread's `stack`.

        A bar with which a later loop goes on is not over."""
        return self.run is not None and self.progress.last and self.run not in stack

    def waits_for(self, progress: ProgressSettings, backward: bool) -> bool:
        """Return whether the bar was left open for a loop with this `progress`."""
        if backward and self.progress.weight:  # backward, each of the loops has its own bar
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
    """Open a bar, or find one left open for the loop; return its number.

    `site`: where a compiled program opens it.
    """
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
    """Close a bar after the last step of a loop, unless another loop goes on with it."""
    bar = _open.get(number)
    own = bar is not None and bar.progress == progress
    if (own and (backward or not progress.first)) or (progress.last and not backward):
        if bar is not None and bar.lanes:
            with closing_if_it_fails(number):
                bar.show_lanes(bar.lanes)
        _close([number])


@contextlib.contextmanager
def bar(progress: ProgressSettings | None, total: int | None) -> Generator[Callable[[int], Any]]:
    """Open a bar for a loop in Python, and yield a function to call with the steps just taken."""
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
    """Open one bar for all loops inside, and yield the settings with which they share it."""
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
        with contextlib.suppress(Exception):  # the first error is the one to raise
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
    """Return the frame that waits for the calling program, and all frames of this thread."""
    frame, names, places = sys._getframe(1), [], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    called = names.index(CALLED_BY) + 1 if CALLED_BY in names else len(names)
    return next(iter(places[called:]), None), set(places)


CALLED_BY = "_wrapped_callback"
"""The name of the function of JAX through which programs call the host."""
