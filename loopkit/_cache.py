"""Not tracing again: functions that do the same, and loops with the same equations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from loopkit import _jax, _jaxpr
from loopkit._function_key import function_key
from loopkit.engine.loop import Loop


class Cached(Protocol):
    """What tracing makes."""

    # Also `closing_over(values)`, the same with other values, if it can be made for others.

    @property
    def closed_over(self) -> list:
        """Values that the functions close over."""
        ...


class Learnt(NamedTuple):
    """What a trace told that holds nothing of it: types, or a number."""

    value: Any

    @property
    def closed_over(self) -> list:
        return []


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
        if 2 * len(self) < self.size:  # the order will not matter for long
            return self.get(key)
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
    """`make()`, or what it returned for functions that do the same on the same argument types.

    Functions that close over tracers do the same with others of the same types.
    """
    tracers: list = []
    key, alive, mortal = _key(functions, rest, tracers)
    try:
        found = _traced.find(key)
    except TypeError:
        return make()
    if found is not None:
        return _with_tracers(found[0], tracers)
    traced = make()
    try:
        kept = _without_tracers(traced, tracers)
        if tracers and _key(functions, rest, [])[0] != key:
            return traced  # it changes what it closes over
    except _Untold:
        return traced

    def forget(_: Any) -> None:
        _traced.pop(key, None)

    try:
        refs = [weakref.ref(f, forget) for f in mortal]
    except TypeError:
        return traced
    _traced.put(key, (kept, alive, refs))
    return traced


def _key(functions: Sequence[Any], rest: Any, tracers: list) -> tuple[Any, list, list]:
    keys, alive, mortal = [], [], []
    for function in functions:
        key, keep, ends = function_key(function, tracers)
        keys.append(key)
        alive += keep
        mortal += ends
    return (*keys, rest, _jax.trace_context()), alive, mortal


class _Untold(Exception):
    """A tracer that came from somewhere unknown."""


class _Place(NamedTuple):
    """Stands for a tracer in what is kept."""

    number: int


def _without_tracers(traced: Any, tracers: list) -> Any:
    """What was traced, with places instead of the tracers that it closes over."""
    if not any(map(_jax.is_tracer, traced.closed_over)):
        return traced
    if not hasattr(traced, "closing_over"):
        raise _Untold
    places = {id(tracer): _Place(k) for k, tracer in enumerate(tracers)}
    values = [places.get(id(v), v) for v in traced.closed_over]
    if any(map(_jax.is_tracer, values)) or traced.has_custom_rules:
        raise _Untold
    return traced.closing_over(values)


def _with_tracers(kept: Any, tracers: list) -> Any:
    values = kept.closed_over
    if not any(isinstance(v, _Place) for v in values):
        return kept
    return kept.closing_over([tracers[v.number] if isinstance(v, _Place) else v for v in values])


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
