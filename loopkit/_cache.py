"""Not tracing again: functions that do the same, and loops with the same equations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from loopkit import _jax, _jaxpr
from loopkit._function_key import function_key
from loopkit.engine.loop import Loop


class Cached(Protocol):
    """What tracing makes."""

    @property
    def closed_over(self) -> list:
        """Values that the functions close over."""
        ...


C = TypeVar("C", bound=Cached)


class Recent(dict):
    """The entries used last, in that order.

    An entry may go at any time, also while it is looked up: its function has died, or another
    thread needs the room. An OrderedDict does not survive that.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def find(self, key: Any) -> Any:
        value = self.pop(key, None)
        if value is not None:
            self[key] = value
        return value

    def put(self, key: Any, value: Any) -> None:
        self[key] = value
        while len(self) > self.size:
            self.pop(next(iter(self), None), None)

    def remember(self, key: Any, make: Callable[[], C]) -> C:
        """`make()`, or what it returned for an equal key, unless that refers to a trace."""
        try:
            found = self.find(key)
        except TypeError:
            return make()
        if found is None:
            found = make()
            if not any(map(_jax.is_tracer, found.closed_over)):
                self.put(key, found)
        return found


_traced = Recent(256)
_loops = Recent(256)


def remember(functions: Sequence[Any], rest: Any, make: Callable[[], C]) -> C:
    """`make()`, or what it returned for functions that do the same on the same argument types."""
    keys, alive, mortal = [], [], []
    for function in functions:
        key, keep, ends = function_key(function)
        keys.append(key)
        alive += keep
        mortal += ends
    key = (*keys, rest, _jax.trace_context())
    try:
        found = _traced.find(key)
    except TypeError:
        return make()
    if found is not None:
        return found[0]
    traced = make()
    if any(map(_jax.is_tracer, traced.closed_over)):
        return traced

    def forget(_: Any) -> None:
        _traced.pop(key, None)

    try:
        refs = [weakref.ref(f, forget) for f in mortal]
    except TypeError:
        return traced
    _traced.put(key, (traced, alive, refs))
    return traced


def interned(loop: Loop) -> Loop:
    """A loop with the same equations that was run before, and so compiled, if there is one."""
    settings = (loop.length, loop.reverse, loop.checkpoints, loop.unroll, loop.name)
    settings += (loop.auto_unroll, loop.xs_axes, loop.ys_axes)
    settings += (loop.buffers, loop.flag, loop.leaves)
    counts = (loop.cond_const_count, loop.const_count, loop.carry_count, loop.xs_count)
    try:
        cond = None if loop.cond is None else _jaxpr.jaxpr_key(loop.cond)
        key = (cond, _jaxpr.jaxpr_key(loop.body), counts, settings)
        found = _loops.find(key)
    except TypeError:
        return loop
    if found is None:
        _loops.put(key, loop)
    return found or loop
