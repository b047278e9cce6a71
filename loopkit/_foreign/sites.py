"""Where the loops of lax stand: what `only` is told about them, and which loops it leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.errors import size


class LoopSite(NamedTuple):
    """A loop of lax, as `only` gets it."""

    kind: Literal["scan", "while_loop"]
    """The kind of the loop. A fori_loop is a scan if lax knows its bounds."""
    name_stack: str
    """The `jax.named_scope`s around the loop, up to the innermost `jit`, separated by slashes."""
    source: str
    """The call that made the loop, as `file:line (function)`, outside JAX itself."""
    length: int | None
    """The number of steps, if it is known; else None."""
    carry_bytes: int
    """The bytes of the carry."""
    depth: int = 0
    """The number of loops of lax around this one."""
    outer: LoopSite | None = None
    """The innermost loop around this one, as it is while its steps are traced. A while loop has no
    `length` yet, and its `carry_bytes` count all its operands."""


def site_of(
    kind: Literal["scan", "while_loop"],
    length: int | None,
    carry: Iterable[Any],
    outer: LoopSite | None,
) -> LoopSite:
    """Describe the loop that is being called, from the types of its carry."""
    depth, count = 0 if outer is None else outer.depth + 1, _jax.byte_count(*carry)
    return LoopSite(kind, _jax.name_stack(), _jax.source(), length, count, depth, outer)


class LeftLoop(NamedTuple):
    """A loop of lax that is not replaced."""

    site: LoopSite
    why: str
    """The reason, such as "`only` leaves it"."""


@dataclass
class Asked:
    """The answers of an `only` so far."""

    chose: bool = False
    """Whether it has chosen a loop."""
    left: dict[LoopSite, None] = field(default_factory=dict)
    """The loops that it has left, in order, until it chooses one."""

    def answer(self, site: LoopSite, chosen: bool) -> bool:
        if chosen:
            self.chose = True
            self.left.clear()
        elif not self.chose:
            self.left[site] = None
        return chosen

    def check(self, function: str) -> None:
        """Raise if there are loops, and `only` has chosen none of them."""
        if not self.left:
            return
        loops = [
            f"the {s.kind} at {s.source} of {size(s.carry_bytes)} in the carry" for s in self.left
        ]
        advice = "Change `only`, or pass `strict=False` if there may be no such loop."
        expected, got = "must choose a loop of lax to replace", f"False for {'; '.join(loops)}"
        raise errors.wrong_value(function, "only", expected, got, advice)


_asked: weakref.WeakKeyDictionary[Any, Asked] = weakref.WeakKeyDictionary()
"""The answers of each `only`. JAX does not trace a function again for the very same `only`, which
is then not asked again."""


def asked(only: Callable[[LoopSite], Any] | None) -> Asked:
    """Return the record of what `only` has answered."""
    try:
        return Asked() if only is None else _asked.setdefault(only, Asked())
    except TypeError:  # nobody can refer to it weakly
        return Asked()


@dataclass(eq=False)
class Notes:
    """The loops that were left while somebody listened, each once."""

    left: dict[LeftLoop, None] = field(default_factory=dict)


def left_within(trace: Callable[[], Any]) -> tuple[LeftLoop, ...]:
    """Return the loops that `trace()` leaves. JAX traces all functions in it anew."""
    notes = Notes()
    with _jax.noting(notes):
        trace()
    return tuple(notes.left)
