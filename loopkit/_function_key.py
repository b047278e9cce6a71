"""When two functions are the same function, so that a loop is not traced again.

A lambda in a function body is a new object on every call. It does the same as the last one if it
has the same code and closes over the same values; a key is made of both. Values that can change
without changing identity give no key, and then only the very same function object is the same.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from loopkit import _jax

LARGEST = 1 << 16
"""Bytes of arrays that a cached function may close over: the cache keeps them alive."""

LIBRARIES = ("builtins", "jax", "jaxlib", "numpy", "math", "equinox", "optax", "loopkit")

NUMBERS = frozenset({bool, int, float, str})
OBJECTS = frozenset({types.FunctionType, types.ModuleType, type})
"""Types that are no trees, for speed."""

IDENTITIES = (types.FunctionType, types.ModuleType, types.BuiltinFunctionType, type)
"""Types of objects that a key takes for what they are, not for what they hold."""


class _Changing(Exception):
    """A value that can change unseen, or that must not be kept."""


class Alive(list):
    """The values that a cache keeps alive for a key."""

    def __init__(self, tracers: list | None):
        super().__init__()
        self.tracers = tracers
        """The tracers that the key has a place for; None if it must have none."""
        self.array_bytes = 0

    def keep(self, value: Any) -> None:
        if isinstance(value, jax.Array) and not _jax.is_tracer(value):
            self.array(value)
        else:
            self.append(value)

    def array(self, value: jax.Array) -> Hashable:
        """The key of an array that is kept."""
        self.array_bytes += value.size * value.dtype.itemsize
        if self.array_bytes > LARGEST:
            raise _Changing
        self.append(value)
        return "array", id(value)


def function_key(function: Any, tracers: list | None = None) -> tuple[Hashable, list, list]:
    """A key, the values that the cache keeps alive for it, and those whose death ends it.

    The tracers that `function` closes over are added to `tracers`, in an order that is that of the
    key. Without such a list there is no key for them.
    """
    alive, before = Alive(tracers), len(tracers or ())
    try:
        return _callable(function, alive, set()), alive, []
    except _Changing:
        if tracers is not None:
            del tracers[before:]
        return ("object", id(function)), [], [function]


def _callable(function: Any, alive: Alive, seen: set) -> Hashable:
    if isinstance(function, types.FunctionType):
        return _function(function, alive, seen)
    if isinstance(function, types.MethodType):
        owner = _value(function.__self__, alive, seen)
        return ("method", _function(function.__func__, alive, seen), owner)
    if isinstance(function, functools.partial):
        bound = _value((function.args, tuple(function.keywords.items())), alive, seen)
        return ("partial", _callable(function.func, alive, seen), bound)
    return ("callable", _value(function, alive, seen))


def _function(function: Any, alive: Alive, seen: set) -> Hashable:
    if id(function) in seen:
        return ("recursive", function.__qualname__)
    seen = seen | {id(function)}
    code = function.__code__
    alive.append(code)
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise _Changing from None
    names = _names(code)
    outside = [function.__globals__.get(name) for name in names]
    read = [None if v is None else _value(v, alive, seen) for v in [*cells, *outside]]
    # Of modules and classes, what the code may look up in them.
    owners = [v for v in [*cells, *outside] if isinstance(v, (types.ModuleType, type))]
    read += [_attributes(v, names, alive) for v in owners]
    defaults = function.__defaults__, function.__kwdefaults__
    if defaults != (None, None):
        defaults = _value(defaults, alive, seen)
    return ("function", code, tuple(read), defaults)


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The globals and attributes that some code mentions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_names(constant))
    return tuple(sorted(names))


def _attributes(owner: Any, names: Sequence[str], alive: Alive, depth: int = 3) -> Hashable:
    """The values of the named attributes of a module or a class, by identity."""
    if not isinstance(owner, (types.ModuleType, type)) or not depth or is_library(owner):
        return None
    found = [(name, vars(owner)[name]) for name in names if name in vars(owner)]
    for _, value in found:
        alive.keep(value)
    return tuple(
        (name, id(value), _attributes(value, names, alive, depth - 1)) for name, value in found
    )


def _value(value: Any, alive: Alive, seen: set) -> Hashable:
    if value is None:
        return None
    kind = type(value)
    if kind in NUMBERS:
        return kind, repr(value) if kind is float else value  # -0.0 is not 0.0
    if kind is _jax.ArrayImpl:
        return alive.array(value)
    if kind in OBJECTS or isinstance(value, jax.Array):
        return _leaf(value, alive, seen)
    if isinstance(value, tuple):
        return type(value), tuple(_value(v, alive, seen) for v in value)
    leaves, tree = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(tree):
        return _leaf(value, alive, seen)
    content = tree, tuple(_leaf(leaf, alive, seen) for leaf in leaves)
    if any(map(_jax.is_tracer, leaves)):
        return content  # its leaves are new each time, and so is it
    # A list or a dict is the same only if it is the same object with the same content: a function
    # may read it, and may write to it.
    alive.append(value)
    return id(value), *content


def _leaf(leaf: Any, alive: Alive, seen: set) -> Hashable:
    if isinstance(leaf, types.FunctionType) and not is_library(leaf):
        return _function(leaf, alive, seen)
    if isinstance(leaf, IDENTITIES):
        alive.append(leaf)
        return ("identity", id(leaf))
    if _jax.is_tracer(leaf):
        return _place(leaf, alive.tracers)
    if isinstance(leaf, jax.Array):
        return alive.array(leaf)
    if isinstance(leaf, np.ndarray):
        if leaf.nbytes > 4096 or leaf.dtype == object:
            raise _Changing
        return ("numpy", leaf.shape, str(leaf.dtype), leaf.tobytes())
    if leaf is None or isinstance(
        leaf, (bool, int, float, complex, str, bytes, np.generic, np.dtype)
    ):
        return (type(leaf), repr(leaf))
    if isinstance(leaf, (types.MethodType, functools.partial)):
        return _callable(leaf, alive, seen)
    if callable(leaf) and is_library(type(leaf)):
        alive.append(leaf)
        return ("identity", id(leaf))
    raise _Changing


def _place(tracer: Any, tracers: list | None) -> Hashable:
    """The type of a tracer, and which of them it is."""
    aval = jax.typeof(tracer)
    if tracers is None or type(aval) is not _jax.ShapedArray:
        raise _Changing
    for place, known in enumerate(tracers):
        if known is tracer:
            return ("known", place)
    tracers.append(tracer)
    # A derivative's tracer of a single number can be asked for its value.
    value = _jax.concrete_value(tracer) if aval.size == 1 else None
    return ("tracer", aval, aval.weak_type, None if value is None else np.asarray(value).tobytes())


def is_library(value: Any) -> bool:
    """Whether a module, class or function belongs to a package that does not change as it runs."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").partition(".")[0] in LIBRARIES
