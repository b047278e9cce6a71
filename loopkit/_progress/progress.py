"""`progress`: the settings with which a loop shows how far it is."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from loopkit._arguments import errors
from loopkit._progress.bars import BUILT_IN

METHODS = "start", "update", "close"


@dataclass(frozen=True)
class ProgressSettings:
    """The settings of a loop that shows its progress; they are part of the compiled program."""

    name: str
    """The name of the function that the user called."""
    start: Callable = field(compare=False, repr=False)
    """Opens a bar, of so many steps."""
    shown: Any = field(compare=False, repr=False)
    """The object with `update` and `close`, unless `start` returns another one."""
    shown_id: int
    """Two are the same if they are the very same object."""
    told: tuple[str, ...]
    """The keywords that `start` takes, of "name" and "backward"."""
    forward: bool = True
    """Whether steps are shown as they are taken, not only as they are reversed."""
    weight: int = 1
    """The user's steps in a step of the loop."""
    whole: int | None = None
    """The total, where it is not that of the loop: of several loops that have one bar."""
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
        """Return whether it goes on with the bar that another loop left open."""
        same = self.name, self.shown_id, self.whole
        return (
            not self.first and not other.last and same == (other.name, other.shown_id, other.whole)
        )

    def opened(self, total: int | None, backward: bool) -> Any:
        """Open the bar, and return the object with `update` and `close`."""
        know = {"name": self.name, "backward": backward}
        made = self.start(total, **{word: know[word] for word in self.told})
        return made if _has(made, METHODS[1:]) else self.shown


def check_progress(function: str, value: Any) -> ProgressSettings | None:
    """Check `progress`: None, a word, an object with three methods, or settings."""
    if value is None or isinstance(value, ProgressSettings):
        return value
    *words, last = (f'"{word}"' for word in BUILT_IN)
    words = f"{', '.join(words)}, {last}"
    expected = f"must be {words} or an object with start(total), update(steps) and close()"
    if isinstance(value, str):
        start = BUILT_IN.get(value)
        if start is None:
            advice = "Pass one of these words, or an object of your own."
            raise errors.wrong_value(function, "progress", expected, repr(value), advice)
        if value != "line" and importlib.util.find_spec(value) is None:
            expected = f'can be "{value}" only if the package {value} is installed'
            advice = f'Run `pip install {value}`, or pass "line", which needs no package.'
            text = errors.wrong(function, "progress", expected, "an environment without it", advice)
            raise ImportError(text)
        return ProgressSettings(function, start, None, id(start), ("name", "backward"))
    if isinstance(value, type) or not _has(value, METHODS):
        got, advice = errors.shown(value), "Give the object the three methods."
        if isinstance(value, type):
            advice = "Pass an instance of the class."
        raise errors.wrong_type(function, "progress", expected, got, advice)
    return ProgressSettings(function, value.start, value, id(value), _keywords(value.start))


def _has(value: object, methods: tuple[str, ...]) -> bool:
    return all(callable(getattr(value, m, None)) for m in methods)


def _keywords(start: Callable[..., Any]) -> tuple[str, ...]:
    """Return the keywords, of those known of a bar, that `start` takes."""
    with contextlib.suppress(TypeError, ValueError):  # of some built-in functions nobody can say
        parameters = inspect.signature(start).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return tuple(word for word in ("name", "backward") if every or word in parameters)
    return ()
