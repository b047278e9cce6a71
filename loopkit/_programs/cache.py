"""Not tracing the very same functions again, and not compiling the same equations again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from loopkit import _jax
from loopkit._programs.key import Unknown, program_key

T = TypeVar("T")


class Recent(dict):
    """The entries used last, in that order.

    An entry may go at any time, also while it is looked up: its function has died, or another
    thread needs the room. An OrderedDict does not survive that.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def find(self, key: Hashable) -> Any:
        if 2 * len(self) < self.size:  # the order will not matter for long
            return self.get(key)
        value = self.pop(key, None)
        if value is not None:
            self[key] = value
        return value

    def put(self, key: Hashable, value: Any) -> None:
        self[key] = value
        while len(self) > self.size:
            self.pop(next(iter(self), None), None)


_traced = Recent(256)
_programs = Recent(256)


def remember(functions: Sequence[Any], rest: Hashable, make: Callable[[], T]) -> T:
    """Return `make()`, or its earlier result for the very same functions under the same conditions.

    As in jax.lax, functions have to be pure. None does not count as a function. Without any
    function, `make` is called each time; so it is if its result says that they close over tracers.
    """
    functions = [f for f in functions if f is not None]
    if not functions:
        return make()
    key = (*map(id, functions), rest, _jax.trace_context())
    try:
        known = _traced.find(key)
    except TypeError:
        return make()
    if known is not None and all(ref() is f for ref, f in zip(known[0], functions, strict=True)):
        return known[1]
    made = make()
    if not any(map(_jax.is_tracer, getattr(made, "closed_over", ()))):
        forget = lambda _: _traced.pop(key, None)
        with contextlib.suppress(TypeError):  # not all that can be called can be referred to
            _traced.put(key, (tuple(weakref.ref(f, forget) for f in functions), made))
    return made


def shared(loop: Any) -> Any:
    """Return the loop of the same equations that was there before, if it is known to be the
    same."""
    return interned(loop.replace(lasting=True)) or loop.replace(lasting=False)


def interned(program: T, results_only: bool = False) -> T | None:
    """Return a program with the same equations that was run before, and so compiled, or this one.

    None if nobody can say what it is equal to. `results_only`: as in `program_key`.
    """
    try:
        key = (program_key(program, results_only), results_only, _jax.trace_context())
        found = _programs.find(key)
    except (Unknown, TypeError):
        return None
    if found is None:
        _programs.put(key, program)
    return program if found is None else found
