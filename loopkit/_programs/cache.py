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


def recall(functions: Sequence[Any], rest: Hashable) -> tuple[Hashable, Any]:
    """Look up what was made of the very same functions under the same conditions, and its key.

    As in jax.lax, functions are taken to be pure. A function of None is left out. Without any
    there is no key, and nothing to look up.
    """
    functions = [f for f in functions if f is not None]
    if not functions:
        return None, None
    key = (*map(id, functions), rest, _jax.trace_context())
    try:
        known = _traced.find(key)
    except TypeError:
        return None, None
    if known is None or any(ref() is not f for ref, f in zip(known[0], functions, strict=True)):
        return key, None
    return key, known[1]


def keep(key: Hashable, functions: Sequence[Any], made: Any) -> None:
    """Have `recall` find what was made, unless its functions close over tracers, as it says."""
    if key is None or any(map(_jax.is_tracer, getattr(made, "closed_over", ()))):
        return
    forget = lambda _: _traced.pop(key, None)
    with contextlib.suppress(TypeError):  # not all that can be called can be referred to
        _traced.put(key, (tuple(weakref.ref(f, forget) for f in functions if f is not None), made))


def remember(functions: Sequence[Any], rest: Hashable, make: Callable[[], T]) -> T:
    """Return `make()`, or what it returned before, as `recall` finds it."""
    key, made = recall(functions, rest)
    if made is None:
        made = make()
        keep(key, functions, made)
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
