"""`progress`: the settings with which a loop shows how far it is, and the built-in bars.

tqdm is imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from loopkit._arguments import errors

SELDOM = 10.0
"""Seconds between updates outside a terminal, where every line stays."""
OFTEN = 0.1
"""Seconds between updates in a terminal or notebook."""


def _is_terminal(stream: object) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def _described(name: str, backward: bool) -> str:
    return f"{name}, backward" if backward else name


class TqdmBar:
    """A tqdm bar, in a terminal or a notebook; that of an inner loop disappears when it closes."""

    def __init__(self, total: int | None, *, name: str, backward: bool):
        from tqdm import auto

        notebook = any(of.__module__ == "tqdm.notebook" for of in auto.tqdm.__mro__)
        often = OFTEN if notebook or _is_terminal(sys.stderr) else SELDOM
        text = _described(name, backward)
        # With None, tqdm leaves only the outermost bar; in a notebook, it would leave none.
        leave = not getattr(auto.tqdm, "_instances", ()) if notebook else None
        self.bar = auto.tqdm(total=total, desc=text, mininterval=often, leave=leave, unit="step")

    def update(self, steps: int) -> None:
        self.bar.update(steps)

    def lanes(self, done: int, of: int) -> None:
        self.bar.set_postfix_str(f"{done} of {of} lanes done", refresh=False)

    def close(self) -> None:
        self.bar.close()


class LineBar:
    """A line of text, updated in place in a terminal, and elsewhere printed again now and then."""

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


BUILT_IN = {"tqdm": TqdmBar, "line": LineBar}
"""The class of a bar, for each word."""


METHODS = "start", "update", "close"


@dataclass(frozen=True)
class ProgressSettings:
    """The settings of a loop that shows its progress; they are part of the compiled program."""

    name: str
    """The name of the function that the user called."""
    shown: Any = field(compare=False, repr=False)
    """The object with `start`, `update` and `close`, or the class of a built-in bar."""
    shown_id: int
    """The id of the object: settings are equal only for the very same object."""
    forward: bool = True
    """Whether steps are shown as they are taken, not only as they are reversed."""
    weight: int = 1
    """The user's steps in a step of the loop."""
    whole: int | None = None
    """The total number of steps of several loops that share a bar; None for the loop's own."""
    first: bool = True
    """Whether this loop opens the bar; if not, an earlier loop of the same call left it open."""
    last: bool = True
    """Whether this loop closes the bar; if not, a later loop of the same call goes on with it."""

    @property
    def backward_only(self) -> ProgressSettings:
        return replace(self, forward=False)

    def part(self, first: bool, last: bool, **more: Any) -> ProgressSettings:
        """Return the settings for one of several loops, one after the other."""
        return replace(self, first=self.first and first, last=self.last and last, **more)

    def goes_on_with(self, other: ProgressSettings) -> bool:
        """Return whether this loop goes on with the bar that another loop left open."""
        same = self.name, self.shown_id, self.whole
        return (
            not self.first and not other.last and same == (other.name, other.shown_id, other.whole)
        )

    def opened(self, total: int | None, backward: bool) -> Any:
        """Open the bar, and return the object with `update` and `close`."""
        start = self.shown if isinstance(self.shown, type) else self.shown.start
        know = {"name": self.name, "backward": backward}
        made = start(total, **{word: know[word] for word in _keywords(start)})
        return made if _has(made, METHODS[1:]) else self.shown


def check_progress(function: str, value: Any) -> ProgressSettings | None:
    """Check `progress`: None, a word, an object with three methods, or settings."""
    if value is None or isinstance(value, ProgressSettings):
        return value
    words = ", ".join(f'"{word}"' for word in BUILT_IN)
    expected = f"must be {words} or an object with start(total), update(steps) and close()"
    if isinstance(value, str):
        shown = BUILT_IN.get(value)
        if shown is None:
            advice = "Pass one of these words, or an object of your own."
            raise errors.wrong_value(function, "progress", expected, repr(value), advice)
        if value != "line" and importlib.util.find_spec(value) is None:
            expected = f'can be "{value}" only if the package {value} is installed'
            advice = f'Run `pip install {value}`, or pass "line", which needs no package.'
            text = errors.wrong(function, "progress", expected, "an environment without it", advice)
            raise ImportError(text)
        return ProgressSettings(function, shown, id(shown))
    if isinstance(value, type) or not _has(value, METHODS):
        got, advice = errors.shown(value), "Give the object the three methods."
        if isinstance(value, type):
            advice = "Pass an instance of the class."
        raise errors.wrong_type(function, "progress", expected, got, advice)
    return ProgressSettings(function, value, id(value))


def _has(value: object, methods: tuple[str, ...]) -> bool:
    return all(callable(getattr(value, m, None)) for m in methods)


def _keywords(start: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of the keywords "name" and "backward" `start` takes."""
    with contextlib.suppress(TypeError, ValueError):  # some built-in functions have no signature
        parameters = inspect.signature(start).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return tuple(word for word in ("name", "backward") if every or word in parameters)
    return ()
