"""Compute rows of short axes as vectors, if the compiler pads short axes.

A TPU keeps arrays in tiles of 8 by 128 numbers. Rows of [10, 5] stacked to [T, 10, 5] take twenty
times the memory that they need, and [T, 50] two and a half times. But a change from a row to a
vector, or back, is an operation of its own there. So rows that steps read and write as vectors stay
vectors in elementwise equations between, and so do the values that loops carry and stack.

Changes of shape inside loops are counted with vectors and without. If vectors take more of them,
they are used only if they save much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import parts
from loopkit._engine.lowering.tiles import is_row, is_stack, saved_bytes
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret

MUCH = 1 << 27
"""The bytes of padding that are worth changes of shape. This is more than the 128 MiB of fast
memory beside the processor of a v5e; other memory is read at 819 GB/s at best."""
_ELEMENTWISE = """
    abs add add_any and ceil clamp convert_element_type copy copy_p div eq floor ge gt imag
    integer_pow is_finite le lt max min mul ne neg nextafter not one_minus_square or real rem round
    rsqrt select_n sign sqrt square stop_gradient sub xor
"""
_COSTLY = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1
    lgamma log log1p logistic pow sin sinh tan tanh
"""
ELEMENTWISE = frozenset((_ELEMENTWISE + _COSTLY).split())
"""Primitives for which an element of the result depends only on operands in the same place."""


class Flat(NamedTuple):
    """A mark for an array whose last axes are merged, while a jaxpr is evaluated."""

    value: Any
    """A row, [n], or rows, [T, n]."""
    shape: tuple[int, ...]
    """The shape as it is written."""
    leaf: Any = None
    """The stack that a loop carries, if this is one of its states."""


class Changes:
    """Counted changes of shape, while a jaxpr is evaluated."""

    def __init__(self) -> None:
        self.count = 0
        """The number of changes of shape in loops."""
        self.depth = 0
        self.saved = 0
        """The bytes of padding that vectors save."""
        self.lost: list = []
        """Stacks that a step uses as a whole."""
        self.made: dict[tuple[int, int], tuple[Any, Any]] = {}

    def once(self, value: jax.Array, axes: int, make: Callable[[], Any]) -> Any:
        """Return `make()`, counted once for each value and number of axes (0: its own shape)."""
        key = (id(value), axes)
        if key not in self.made:
            self.count += self.depth > 0
            self.made[key] = make(), value  # it lives as long as its id is a key
        return self.made[key][0]

    def plain(self, value: jax.typing.ArrayLike | Flat) -> Any:
        """Return a value in its own shape."""
        if not isinstance(value, Flat):
            return value
        if value.value.ndim > 1:
            self.lost.append(value.leaf)
        made = self.once(value.value, 0, lambda: value.value.reshape(value.shape))
        return made.reshape(value.shape)  # the same row may also have axes of one

    def flat(self, value: jax.Array | Flat, shape: tuple[int, ...] = (-1,)) -> Any:
        """Return a row as a vector or, with that shape, rows as vectors."""
        array = value.value if isinstance(value, Flat) else value
        if isinstance(value, Flat) and array.ndim == len(shape):
            return array
        return self.once(array, len(shape), lambda: array.reshape(shape))


def of_vectors(evaluate: Callable) -> Callable:
    """Return a function of arrays that computes rows of short axes as vectors."""

    def evaluated(*operands: jax.Array, **params: Any) -> list:
        types = list(map(jax.typeof, operands))
        jaxpr, closed = _jax.trace(lambda *v: evaluate(*v, **params), types, "loop")
        values = [*closed, *operands]
        if _pays(jaxpr):
            return _run_flat(jaxpr, values, Changes())
        return list(_jax.call_jaxpr(jaxpr)(*values))

    return evaluated


def _pays(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether vectors spare changes of shape, or much memory."""
    if not _has_short_rows(jaxpr):
        return False
    found = Changes()
    _jax.trace(lambda *v: _run_flat(jaxpr, v, found), jaxpr.in_avals, "loop")
    return found.count <= _reshapes(jaxpr) or found.saved >= MUCH


def _has_short_rows(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a loop stacks rows of short axes, or makes such rows of vectors."""
    loops = [e for e in equations.all_equations(jaxpr) if e.primitive is _jax.lax_while_p]
    stacks = any(is_stack(v.aval) for eqn in loops for v in eqn.invars)
    return stacks or bool(_reshapes(jaxpr))


def _reshapes(jaxpr: _jax.Jaxpr, inside: bool = False) -> int:
    """Return the number of changes of shape in loops, as they are written."""
    count = 0
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if equations.is_call(eqn):
            count += _reshapes(eqn.params["jaxpr"], inside)
        elif eqn.primitive is _jax.lax_while_p:
            count += _reshapes(eqn.params["body_jaxpr"], True)
        elif inside and eqn.primitive is lax.reshape_p:
            before, after = eqn.invars[0].aval, eqn.outvars[0].aval
            count += is_row(before) != is_row(after)
    return count


def _run_flat(jaxpr: _jax.Jaxpr, values: Sequence[Any], found: Changes) -> list:
    outs = _run(_jax.open_jaxpr(jaxpr), values, found)
    return list(map(found.plain, outs))


def _run(j: _jax.OpenJaxpr, values: Sequence[Any], found: Changes) -> list:
    """Return the results of a jaxpr, some of whose values are `Flat`."""

    def rule(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
        if equations.is_call(eqn):
            return None
        if eqn.primitive is _jax.lax_while_p:
            return _loop(eqn, ins, found)
        if eqn.primitive.name.startswith("custom_") and "call_jaxpr" in eqn.params:
            return _inside(eqn.params["call_jaxpr"], ins, found)  # no derivative follows
        made = _flat_results(eqn, ins, found)
        if made is not None:
            return made
        return _jax.bind_equation(eqn, list(map(found.plain, ins)))

    return interpret(j, values, rule)


def _flat_results(eqn: _jax.Equation, ins: list, found: Changes) -> Sequence[Any] | None:
    """Return the results of an equation on vectors, if it can be evaluated on them."""
    flats = [isinstance(v, Flat) for v in ins]
    out = eqn.outvars[0].aval if eqn.outvars else None
    if eqn.primitive is _jax.blank_p and out is not None and is_stack(out):
        shape = out.shape[0], _jax.volume(out.shape[1:])
        return [Flat(eqn.primitive.bind(*ins, **dict(eqn.params, shape=shape)), out.shape)]
    if eqn.primitive in (lax.reshape_p, lax.squeeze_p, lax.broadcast_in_dim_p):
        return _in_shape(eqn, ins, out)
    if not any(flats):
        return None
    if eqn.primitive is lax.optimization_barrier_p:
        held = lax.optimization_barrier(
            [v.value if f else v for v, f in zip(ins, flats, strict=True)]
        )
        return [Flat(h, *v[1:]) if f else h for h, v, f in zip(held, ins, flats, strict=True)]
    if eqn.primitive is lax.dynamic_slice_p and flats == [True] + [False] * (len(ins) - 1):
        return _slice(eqn, ins)
    if eqn.primitive is lax.dynamic_update_slice_p and flats[0]:
        return _update(ins, found)
    if eqn.primitive.name.startswith("reduce_") and len(ins) == 1:
        return _reduced(eqn, ins[0])
    if eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
        return _elementwise(eqn, ins, out, found)
    return None


def _in_shape(eqn: _jax.Equation, ins: list, out: Any) -> Sequence[Any] | None:
    """Return a vector in another shape, which is the same vector."""
    value, shape = ins[0], tuple(out.shape)
    if eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is not None:
        return None
    if isinstance(value, Flat):
        if value.value.ndim > 1 or _jax.volume(value.shape) != _jax.volume(shape):
            return None
        return [Flat(value.value, shape) if is_row(out) else value.value.reshape(shape)]
    if not is_row(out) or is_row(eqn.invars[0].aval) or len(ins) > 1:
        return None
    elements = jnp.size(value)
    if elements == 1:
        return [Flat(jnp.broadcast_to(jnp.reshape(value, ()), _jax.volume(shape)), shape)]
    return [Flat(value.reshape(-1), shape)] if elements == _jax.volume(shape) else None


def _slice(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
    stack, *starts = ins
    sizes = eqn.params["slice_sizes"]
    if stack.value.ndim == 1 or tuple(sizes[1:]) != stack.shape[1:] or sizes[0] != 1:
        return None
    zero = jnp.zeros_like(starts[0])
    row = lax.dynamic_slice_p.bind(
        stack.value, starts[0], zero, slice_sizes=(1, stack.value.shape[-1])
    )
    return [Flat(row.reshape(-1), tuple(sizes))]


def _update(ins: list, found: Changes) -> Sequence[Any] | None:
    stack, new, *starts = ins
    shape = new.shape if isinstance(new, Flat) else jnp.shape(new)
    if stack.value.ndim == 1 or shape != (1, *stack.shape[1:]):
        return None
    row = found.flat(new).reshape(1, -1)
    zero = jnp.zeros_like(starts[0])
    return [Flat(lax.dynamic_update_slice_p.bind(stack.value, row, starts[0], zero), *stack[1:])]


def _reduced(eqn: _jax.Equation, row: Flat) -> Sequence[Any] | None:
    """Reduce a vector: over all axes, their number does not matter; axes of one need no work."""
    axes = eqn.params.get("axes", ())
    if row.value.ndim > 1:
        return None
    if len(axes) == len(row.shape):
        return [eqn.primitive.bind(row.value, **dict(eqn.params, axes=(0,)))]
    out = eqn.outvars[0].aval
    same = eqn.primitive in (lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p)
    if same and all(row.shape[a] == 1 for a in axes) and is_row(out):
        return [Flat(row.value, tuple(out.shape))]
    return None


def _elementwise(eqn: _jax.Equation, ins: list, out: Any, found: Changes) -> Sequence[Any] | None:
    shapes = {v.shape if isinstance(v, Flat) else jnp.shape(v) for v in ins} - {()}
    if shapes != {tuple(out.shape)}:
        return None
    # This is a stack, if there is one.
    most = max((v for v in ins if isinstance(v, Flat)), key=lambda v: v.value.ndim)
    shape = (-1,) if most.value.ndim == 1 else most.value.shape
    scalar = lambda v: not isinstance(v, Flat) and jnp.ndim(v) == 0
    if len(shape) > 1 and not all(isinstance(v, Flat) or scalar(v) for v in ins):
        return None
    values = [v if scalar(v) else found.flat(v, shape) for v in ins]
    (made,) = _jax.bind_equation(eqn, values)
    return [Flat(made, tuple(out.shape), most.leaf)]


# ---------------------------------------------------------------- loops


def _loop(eqn: _jax.Equation, ins: list, found: Changes) -> list:
    """Evaluate a loop that carries rows as vectors, and stacks as rows of vectors, if possible."""
    asked, values = parts(ins, eqn.params["cond_nconsts"])
    asked, types = list(map(found.plain, asked)), [v.aval for v in eqn.invars[len(asked) :]]
    best, ways = _best(eqn, asked, types)
    found.count += best.count
    held = [_held(v, way, found) for v, way in zip(values, ways, strict=True)]
    fixed, init = parts(held, eqn.params["body_nconsts"])
    known = _wrapped(fixed, types[: len(fixed)], ways[: len(fixed)])
    shapes, carried = types[len(fixed) :], ways[len(fixed) :]
    found.saved += sum(saved_bytes(t) for t, way in zip(types, ways, strict=True) if way == "stack")

    def wrapped(carry: Sequence[Any]) -> list:
        return _wrapped(carry, shapes, carried)

    def body(carry: list) -> list:
        of_step = Changes()
        outs = _inside(eqn.params["body_jaxpr"], [*known, *wrapped(carry)], of_step)
        return [_held(v, way, of_step) for v, way in zip(outs, carried, strict=True)]

    def goes_on(carry: list) -> Any:
        of_step = Changes()
        outs = _inside(eqn.params["cond_jaxpr"], [*asked, *wrapped(carry)], of_step)
        return of_step.plain(outs[0])

    with _jax.context_of(eqn):
        return wrapped(lax.while_loop(goes_on, body, init))


def _inside(jaxpr: _jax.Jaxpr, values: list, found: Changes) -> list:
    return _run(_jax.open_jaxpr(jaxpr), [*getattr(jaxpr, "consts", ()), *values], found)


def _best(eqn: _jax.Equation, asked: list, types: Sequence[Any]) -> tuple[Changes, list]:
    """Return the changes that a step takes, and how to hold what a loop reads and carries."""
    stacks = ["stack" if is_stack(t) else None for t in types]
    rows = ["row" if is_row(t) else None for t in types]
    orders = [(stacks, rows), (stacks, [None] * len(rows))]
    if any(s and r for s, r in zip(stacks, rows, strict=True)):  # [2, 5, 5] may be either
        orders.append((rows, stacks))
    tries = [_settled(eqn, asked, types, *order) for order in orders]
    return min(tries, key=lambda found: found[0].count)


def _settled(eqn: Any, asked: list, types: Sequence[Any], first: list, second: list) -> tuple:
    """Hold values in the first way or else the second, but not stacks used as a whole."""
    ways = [a or b for a, b in zip(first, second, strict=True)]
    while True:
        found, failed = _tried(eqn, asked, types, ways)
        if not failed:
            return found, ways
        others = [b if a == "stack" else None for a, b in zip(first, second, strict=True)]
        ways = [others[i] if i in failed else way for i, way in enumerate(ways)]


def _tried(eqn: Any, asked: list, types: Sequence[Any], ways: list) -> tuple[Changes, set[int]]:
    """Try a step: return the changes that it takes, and the stacks that it uses as a whole."""
    found, failed, fixed = Changes(), set(), eqn.params["body_nconsts"]
    found.depth = 1

    def step(*values: jax.Array) -> list:
        held = _wrapped(values, types, ways)
        leaves = {id(v.leaf): i for i, v in enumerate(held) if isinstance(v, Flat)}
        outs = _inside(eqn.params["body_jaxpr"], held, found)
        for i, (v, way) in enumerate(zip(outs, ways[fixed:], strict=True), fixed):
            if way == "stack" and not (isinstance(v, Flat) and v.value.ndim == 2):
                failed.add(i)
        goes = _inside(eqn.params["cond_jaxpr"], [*asked, *held[fixed:]], found)
        list(map(found.plain, goes))
        failed.update(leaves[id(leaf)] for leaf in found.lost if id(leaf) in leaves)
        return [_held(v, way, found) for v, way in zip(outs, ways[fixed:], strict=True)]

    _jax.trace(step, [_type(t, way) for t, way in zip(types, ways, strict=True)], "loop_step")
    return found, failed


def _type(aval: _jax.ShapedArray, way: str | None) -> Any:
    if way is None:
        return aval
    lead = aval.shape[:1] if way == "stack" else ()
    return _jax.of_shape(aval, (*lead, _jax.volume(aval.shape[len(lead) :])))


def _wrapped(values: Sequence[Any], types: Sequence[Any], ways: Sequence[str | None]) -> list:
    triples = zip(values, types, ways, strict=True)
    return [v if way is None else Flat(v, tuple(t.shape), object()) for v, t, way in triples]


def _held(value: Any, way: str | None, found: Changes) -> Any:
    """Hold a value as a loop carries it."""
    if way is None:
        return found.plain(value)
    return found.flat(value, (value.shape[0], -1) if way == "stack" else (-1,))
