"""Caches that avoid tracing the same functions again, and compiling the same equations again.

The key of a program is complete by construction. It covers all that the program depends on:
equations, the contexts they were written in, constants by content or identity. A value that it
cannot describe raises `Unknown`, and its program equals no other. A value known by identity lives
as long as the program that the key was made from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from loopkit import _jax

T = TypeVar("T")


class Recent(dict):
    """A cache of the entries used last, in that order.

    An entry may disappear at any time, even while it is looked up: its function has died, or
    another thread needs the room. An OrderedDict does not survive that.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def find(self, key: Hashable) -> Any:
        if 2 * len(self) < self.size:  # the order does not matter yet
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
    """Return the key of functions and `rest`, and what was made for that key before, or None.

    As in jax.lax, functions are assumed to be pure. Functions that are None are ignored. Without
    any function, there is no key, and nothing to look up.
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
    """Store what was made, for `recall` to find, unless it closes over tracers."""
    if key is None or any(map(_jax.is_tracer, getattr(made, "closed_over", ()))):
        return
    forget = lambda _: _traced.pop(key, None)
    with contextlib.suppress(TypeError):  # some callables do not support weak references
        _traced.put(key, (tuple(weakref.ref(f, forget) for f in functions if f is not None), made))


def remember(functions: Sequence[Any], rest: Hashable, make: Callable[[], T]) -> T:
    """Return `make()`, or its earlier result if `recall` finds one."""
    key, made = recall(functions, rest)
    if made is None:
        made = make()
        keep(key, functions, made)
    return made


def shared(loop: Any) -> Any:
    """Return an earlier loop with the same equations, if there is one; otherwise this loop."""
    return interned(loop.replace(lasting=True)) or loop.replace(lasting=False)


def with_fields(loop: Any, **changes: Any) -> Any:
    """Return the loop with other fields, made only once for the same fields."""
    make = lambda: shared(loop.replace(**changes))
    return loop.derived(("with_fields", *changes.items()), make)


def interned(program: T, results_only: bool = False) -> T | None:
    """Return an earlier program with the same equations, which may be compiled, or this one.

    Return None if the program has no key. `results_only`: as in `program_key`.
    """
    try:
        key = (program_key(program, results_only), results_only, _jax.trace_context())
        found = _programs.find(key)
    except (Unknown, TypeError):
        return None
    if found is None:
        _programs.put(key, program)
    return program if found is None else found


SMALL_ARRAY = 4096
"""The bytes up to which a constant is its own key; the key of a larger one is a digest."""


class Unknown(Exception):
    """Raised for a value that has no key, because what equals it is not known."""


RULES = {
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
    "checkpoint": {"policy"},
    "remat2": {"policy"},
}
"""Parameters that only derivatives of an equation read, and on which its results do not depend. The
results of the derivative of a loop do depend on these parameters, at any depth inside it."""


FUNCTIONS = ("builtins", "functools", "jax", "jaxlib", "numpy")
"""The packages whose classes are assumed never to change."""


def program_key(program: object, results_only: bool = False, met: list | None = None) -> Hashable:
    """Return the key of a jaxpr, or of whatever else makes one; raise `Unknown` if there is none.

    `results_only`: the key covers the results, and not the derivatives. `met`: a list to which
    functions are added; the key has only their types.
    """
    return _Keys(results_only, met).of(program)


class _Keys:
    def __init__(self, results_only: bool, met: list | None):
        self.results_only, self.met = results_only, met
        self.contexts: dict[int, Hashable] = {}

    def of(self, value: Any) -> Hashable:
        kind, of, met = type(value), self.of, self.met
        if value is None or kind in (bool, int, str, bytes):
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # -0.0 is not 0.0, and NaN is NaN
        if kind in (tuple, list):
            return kind, tuple(map(of, value))
        if kind is dict:
            return kind, tuple((of(k), of(v)) for k, v in value.items())
        if kind is jax.tree_util.PyTreeDef:
            return of(value.node_data()), tuple(map(of, value.children()))
        if isinstance(value, (type, np.dtype, enum.Enum, *_jax.COMPARED)):
            return kind, value
        if hasattr(value, "eqns") and met is None:
            return self.jaxpr(value)
        if kind in (set, frozenset):
            return kind, frozenset(map(of, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind, tuple(map(of, value))
        if isinstance(value, (np.ndarray, np.generic, _jax.TypedNdArray)):
            return _content(np.asarray(value))
        if isinstance(value, jax.Array) and met is None and not _jax.is_tracer(value):
            return kind, id(value)
        if isinstance(value, functools.partial):
            return kind, of(value.func), of(value.args), of(value.keywords)
        if isinstance(value, types.MethodType):
            return kind, of(value.__func__), of(value.__self__)
        if callable(value) and (policy := _jax.held_by(value)) is not None:
            return policy[0], of(policy[1])
        if met is not None and callable(value) and is_of_library(kind):
            met.append(value)
            return kind
        if dataclasses.is_dataclass(value) and _root(kind) == "loopkit":
            fields = (getattr(value, f.name) for f in dataclasses.fields(value) if f.compare)
            return kind, tuple(map(of, fields))
        raise Unknown

    def jaxpr(self, jaxpr: _jax.Jaxpr) -> Hashable:
        j = _jax.open_jaxpr(jaxpr)
        names: dict[Any, int] = {}

        def atom(v: _jax.Atom) -> Hashable:
            if not isinstance(v, _jax.Literal):
                return names.setdefault(v, len(names))
            known = isinstance(v.val, jax.Array)
            return typed(v.aval), self.of(v.val) if known else _content(np.asarray(v.val))

        def parameters(eqn: _jax.Equation) -> Hashable:
            name, params = eqn.primitive.name, eqn.params.items()
            if "loop" in eqn.params and name != "loopkit_while":
                return _Keys(False, None).of(eqn.params)
            without = RULES.get(name, ()) if self.results_only else ()
            return tuple((k, self.of(v)) for k, v in params if k not in without)

        head = tuple((atom(v), typed(v.aval)) for v in (*j.constvars, *j.invars))
        eqns = tuple(
            (
                eqn.primitive,
                tuple(map(atom, eqn.invars)),
                tuple((atom(v), typed(v.aval)) for v in eqn.outvars),
                parameters(eqn),
                self.context(eqn.ctx),
                str(eqn.source_info.name_stack),
            )
            for eqn in j.eqns
        )
        consts = tuple(map(self.of, getattr(jaxpr, "consts", ())))
        return head, consts, eqns, tuple(map(atom, j.outvars))

    def context(self, ctx: Any) -> Hashable:
        if id(ctx) not in self.contexts:
            names = set(type(ctx).__slots__) - {"__weakref__", "configs"}
            self.contexts[id(ctx)] = tuple(self.of(getattr(ctx, n)) for n in sorted(names))
        return self.contexts[id(ctx)]


def _content(value: np.ndarray) -> Hashable:
    if value.dtype.hasobject:
        raise Unknown
    content = value.tobytes()
    if len(content) > SMALL_ARRAY:
        content = hashlib.blake2b(content).digest()
    return value.dtype, value.shape, content


def is_of_library(kind: type) -> bool:
    """Return whether a class is of a package in `FUNCTIONS`."""
    return _root(kind) in FUNCTIONS


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def typed(aval: _jax.ShapedArray) -> Hashable:
    return aval, getattr(aval, "weak_type", False)
