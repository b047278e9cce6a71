"""The derivative of a loop in which a single number moves: it is found as the loop runs.

If t is the tangent of the only operand that moves, and t is a number, the tangents of the results
are t times one column, L 1. The dual loop computes this column in the first run. So the gradient
keeps no checkpoints, runs no step again, and needs no bound on the number of steps.

    scale  (t, column)  -> t * column
    weigh  (w, column)  -> sum of w * column

Each is the transpose of the other. Under vmap, both have further leading axes. A zero does not
count, even times infinity: a column may overflow in rows that have no part in the gradient, and
reverse mode never computes those.
"""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._arguments.finite import watch_p
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations
from loopkit._plans.budget import Share

scale_p = _jax.declare("loopkit_scale")
weigh_p = _jax.declare("loopkit_weigh")
SHORT = 1 << 16
"""The bytes of columns of ys and tables up to which these do not matter."""
UNKNOWN = 1024
"""The assumed number of steps if nothing bounds it."""
REVERSED = watch_p.name, "custom_vmap_call"
"""The names of primitives in steps that are always reversed: cotangents are checked, too, or the
step of a lane may depend on the numbers of others."""


def number_that_moves(loop: Loop, tangents: Sequence[Any]) -> Any:
    """Return the only tangent of a loop, if it is that of one real number; otherwise None.

    Loops with a budget have to keep to it, and some steps have no JVP. Where steps communicate,
    every device or lane has a number of its own. A column of less precision than the number would
    round its derivative, and long columns would take more memory than reverse mode.
    """
    moving = [t for t in tangents[loop.cond_const_count :] if type(t) is not _jax.Zero]
    if len(moving) != 1 or not (loop.checkpoints is None or isinstance(loop.checkpoints, Share)):
        return None
    if loop.holds_custom_vjp or loop.has_impure_callback or loop.shows or loop.axis_names:
        return None
    if any(eqn.primitive.name in REVERSED for eqn in equations.all_equations(loop.body)):
        return None
    aval = jax.typeof(moving[0])
    if aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    finest, types = jnp.finfo(aval.dtype).eps, filter(_jax.is_differentiable, loop.result_types)
    fine = all(jnp.finfo(t.dtype).eps <= finest for t in types)
    return moving[0] if fine and _has_short_columns(loop) else None


def _has_short_columns(loop: Loop) -> bool:
    """Return whether columns of rows are no larger than what reverse mode keeps of other leaves.

    It keeps no ys, and may keep nothing of a leaf on which no other depends, such as a table that
    steps only write to. Of another leaf it keeps many values, and its column is one.
    """
    size = lambda t: _jax.byte_count(t) if _jax.is_differentiable(t) else 0
    sizes, ys = list(map(size, loop.carry_types)), sum(map(size, loop.ys_types))
    if ys + sum(sizes) <= SHORT:
        return True
    rows = sum(n for i, n in enumerate(sizes) if _is_alone(loop, i))
    steps = loop.length if isinstance(loop.length, int) else UNKNOWN
    return ys + rows <= max(SHORT, 2 * math.isqrt(steps) * (sum(sizes) - rows))


def _is_alone(loop: Loop, leaf: int) -> bool:
    """Return whether no other result of a step depends on a leaf of the carry."""
    others = [i != leaf for i in range(loop.carry_count + loop.ys_count)]
    return not _jax.used_inputs(loop.body, others)[loop.const_count + leaf]


def along(
    rule: Callable, number: jax.Array, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list, list]:
    """Return the results and tangents of a loop, by its JVP rule in the direction of a number."""
    aval = jax.typeof(number)
    one = _jax.vary_like(_one(aval.dtype), [aval])
    still = [_jax.float0_zero(jax.typeof(v)) for v in primals]
    results, columns = rule(
        primals, [one if t is number else z for t, z in zip(tangents, still, strict=True)]
    )
    return results, [c if type(c) is _jax.Zero else _scaled(number, c) for c in columns]


@ft.partial(jax.jit, static_argnums=0, inline=True)
def _one(dtype: Any) -> jax.Array:
    """Return 1. Compiled, it moves no number to the device."""
    return jnp.ones((), dtype)


def _scaled(number: jax.Array, column: jax.Array) -> Any:
    types = jax.typeof(number), jax.typeof(column)
    return scale_p.bind(*(_jax.vary_like(v, types) for v in (number, column)))[0]


def _times(number: jax.Array, column: jax.Array) -> Any:
    number = lax.convert_element_type(number, column.dtype)
    return _jax.weak_as(_along(number, column) * column, jax.typeof(column))


def _sum(weights: jax.Array, column: jax.Array, *, axes: int, dtype: Any, weak: bool) -> Any:
    found = (weights * column).sum(range(axes, column.ndim)).real.astype(dtype)
    return _jax.weak_as(found, _jax.ShapedArray((), dtype, weak_type=weak))


def _along(number: jax.Array, column: jax.Array) -> jax.Array:
    """Return a number, or one for each of the first axes of a column, with as many axes."""
    return lax.expand_dims(number, range(number.ndim, column.ndim))


def _jvp(
    bind: Callable, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list, list]:
    (a, b), (t_a, t_b) = primals, tangents
    outs = bind(a, b, **params)
    moved = _jax.float0_zero(jax.typeof(outs[0]))
    if type(t_a) is not _jax.Zero:
        moved = bind(t_a, b, **params)[0]
    if type(t_b) is not _jax.Zero:
        moved = _jax.add_tangents(moved, bind(a, t_b, **params)[0])
    return outs, [moved]


def _transpose(
    of_first: Callable, of_second: Callable, cts: Sequence[Any], a: Any, b: Any, **_: object
) -> list:
    (ct,) = cts
    if type(ct) is _jax.Zero:
        return [_jax.float0_zero(v.aval) if _jax.is_undefined(v) else None for v in (a, b)]
    if _jax.is_undefined(a):
        return [*of_first(ct, b, a.aval), None]
    return [None, *of_second(a, ct)]


def _define(primitive: Any, product: Callable, of_first: Callable, of_second: Callable) -> None:
    def evaluate(a: jax.Array, b: jax.Array, **params: Any) -> list:
        return [product(a, jnp.where(_along(a, b) == 0, 0, b), **params)]

    def types(*avals: Any, **params: Any) -> tuple[list, Any]:
        traced = _jax.trace_closed(ft.partial(evaluate, **params), avals, "one_number")
        return list(traced.out_avals), set()

    def taylor(primals: Sequence[Any], series: Sequence[Any], order: int, **params: Any) -> tuple:
        return _jax.taylor(lambda *v: [product(*v, **params)], primals, series, order)

    def batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
        size, over = axis.size, axis.explicit_mesh_axis
        moved = [_jax.move(v, d, 0, size, over) for v, d in zip(args, dims, strict=True)]
        params |= {"axes": params["axes"] + 1} if params else {}
        return primitive.bind(*moved, **params), [0]

    _jax.define(
        primitive,
        evaluate,
        types,
        jvp=ft.partial(_jvp, primitive.bind),
        taylor=taylor,
        transpose=ft.partial(_transpose, of_first, of_second),
    )
    _jax.register_batching(primitive, batch)


def _like(aval: _jax.ShapedArray) -> dict[str, Any]:
    """Return the parameters of a `weigh` with a result like this."""
    return {"axes": aval.ndim, "dtype": aval.dtype, "weak": aval.weak_type}


_define(
    scale_p,
    _times,
    lambda ct, column, aval: weigh_p.bind(ct, column, **_like(aval)),
    lambda number, ct: scale_p.bind(number, ct),
)
_define(
    weigh_p,
    _sum,
    lambda ct, column, _: scale_p.bind(ct, column),
    lambda weights, ct: scale_p.bind(ct, weights),
)
