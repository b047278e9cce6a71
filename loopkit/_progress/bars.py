"""The bars that `progress` names by a word: tqdm, rich (each imported on first use) and a line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SELDOM = 10.0
"""Seconds between two lines where nobody looks: what is no terminal keeps all of them."""
OFTEN = 0.1
"""Seconds between two in a terminal."""


def _is_terminal(stream: object) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def _described(name: str, backward: bool) -> str:
    return f"{name}, backward" if backward else name


class TqdmBar:
    """A bar of tqdm, in a terminal or a notebook; the bar of an inner loop disappears when it
    closes."""

    def __init__(self, total: int | None, *, name: str, backward: bool):
        from tqdm import auto

        notebook = any(of.__module__ == "tqdm.notebook" for of in auto.tqdm.__mro__)
        often = OFTEN if notebook or _is_terminal(sys.stderr) else SELDOM
        text = _described(name, backward)
        # None: if it is the outermost, which in a notebook would be: never.
        leave = not getattr(auto.tqdm, "_instances", ()) if notebook else None
        self.bar = auto.tqdm(total=total, desc=text, mininterval=often, leave=leave, unit="step")

    def update(self, steps: int) -> None:
        self.bar.update(steps)

    def lanes(self, done: int, of: int) -> None:
        self.bar.set_postfix_str(f"{done} of {of} lanes done", refresh=False)

    def close(self) -> None:
        self.bar.close()


class _Display:
    """The one display of rich, which shows all bars; rich allows one at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shown: Any = None
        self.count = 0

    def opened(self) -> Any:
        from rich import progress

        if self.shown is None:
            lanes = progress.TextColumn("{task.fields[lanes]}")
            self.shown = progress.Progress(*progress.Progress.get_default_columns(), lanes)
            self.shown.start()
        self.count += 1
        return self.shown

    def closed(self) -> None:
        self.count -= 1
        if not self.count:
            self.shown.stop()
            self.shown = None


_display = _Display()


class RichBar:
    """A bar of rich; the bar of an inner loop disappears when it closes."""

    def __init__(self, total: int | None, *, name: str, backward: bool):
        with _display.lock:
            self.shown = _display.opened()
            self.inner = _display.count > 1
            self.task = self.shown.add_task(_described(name, backward), total=total, lanes="")

    def update(self, steps: int) -> None:
        self.shown.advance(self.task, steps)

    def lanes(self, done: int, of: int) -> None:
        self.shown.update(self.task, lanes=f"{done} of {of} lanes done")

    def close(self) -> None:
        with _display.lock:
            if self.inner:
                self.shown.remove_task(self.task)
            _display.closed()


class LineBar:
    """A line of text, in place in a terminal; elsewhere it is written again now and then."""

    def __init__(self, total: int | None, *, name: str, backward: bool):
        self.total, self.name, self.steps = total, _described(name, backward), 0
        self.stream, self.said = sys.stderr, ""
        self.over = _is_terminal(self.stream)
        self.since = self.written = time.perf_counter()

    def update(self, steps: int) -> None:
        self.steps += steps
        if time.perf_counter() - self.written > (OFTEN if self.over else SELDOM):
            self.write("" if self.over else "\n")

    def lanes(self, done: int, of: int) -> None:
        self.said = f", {done} of {of} lanes done"

    def close(self) -> None:
        self.write("\n")

    def write(self, end: str) -> None:
        self.written = time.perf_counter()
        of = f" of {self.total:,}" if self.total is not None else ""
        begin = "\r" if self.over else ""
        seconds = f"{self.written - self.since:.1f} s"
        line = f"{begin}{self.name}: {self.steps:,}{of} steps{self.said}, {seconds}{end}"
        self.stream.write(line)
        self.stream.flush()


BUILT_IN: dict[str, Callable[..., Any]] = {"tqdm": TqdmBar, "rich": RichBar, "line": LineBar}
"""The class that opens a bar, for each word."""
