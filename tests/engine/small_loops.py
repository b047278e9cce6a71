"""Loops written down directly, and what they compute according to `loopkit/_engine/loop.py`."""

import jax
import numpy as np

from loopkit import _jax
from loopkit._engine.loop import CarryLeaf, Const, Input, Loop, Operands, Output, parts
from tolerances import RELATIVE


def types_of(values):
    return [jax.typeof(jax.numpy.asarray(v)) for v in values]


def make_loop(
    body,
    consts,
    init,
    xs=(),
    *,
    cond=None,
    cond_consts=(),
    length=None,
    x_axes=None,
    y_axes=None,
    buffers=(),
    **settings,
):
    """A loop and its operands; lists of arrays throughout.

    body(consts, carry, x) -> carry, y        cond(cond_consts, carry) -> bool
    """
    xs = [np.asarray(x) for x in xs]
    x_axes = [0] * len(xs) if x_axes is None else x_axes
    length = xs[0].shape[x_axes[0]] if xs and length is None else length
    slices = [x.take(0, axis) for x, axis in zip(xs, x_axes, strict=True)]
    counts = len(consts), len(init)
    ys = 0

    def step(*values):
        nonlocal ys
        new, y = body(*parts(values, *counts))
        ys = len(y)
        return [*new, *y]

    def asks(*values):
        return [cond(*parts(values, len(cond_consts)))]

    step = _jax.trace_closed(step, types_of([*consts, *init, *slices]), "step")
    if cond is not None:
        asks = _jax.trace_closed(asks, types_of([*cond_consts, *init]), "asks")
    loop = Loop(
        cond=None if cond is None else asks,
        body=step,
        cond_const_count=len(cond_consts),
        consts=(Const(),) * len(consts),
        carry=tuple(CarryLeaf(f"carry {i}", i in buffers) for i in range(len(init))),
        xs=tuple(map(Input, x_axes)),
        ys=tuple(map(Output, [0] * ys if y_axes is None else y_axes)),
        length=length,
        **settings,
    )
    values = ([np.asarray(v) for v in group] for group in (cond_consts, consts, init))
    return loop, Operands(*values, xs)


def compiled(jaxpr):
    return None if jaxpr is None else jax.jit(_jax.call_jaxpr(jaxpr))


def is_active(asks, cond_consts, carry):
    return np.array(True) if asks is None else np.asarray(asks(*cond_consts, *carry)[0])


def where(active, new, old):
    """`new` in the active lanes; they are the first axes."""
    return np.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)


def run(loop, operands):
    """The results of a loop, step by step: final carry, then ys."""
    body, asks = loop.derived("test jits", lambda: list(map(compiled, (loop.body, loop.cond))))
    carry = list(map(np.array, operands.init))
    ys = [np.zeros(t.shape, t.dtype) for t in loop.ys_types] if loop.ys_count else []
    step = 0
    while loop.length is None or step < loop.length:
        active = is_active(asks, operands.cond_consts, carry)
        if not active.any():
            break
        row = loop.length - 1 - step if loop.reverse else step
        x = [v.take(row, axis) for v, axis in zip(operands.xs, loop.x_axes, strict=True)]
        outs = map(np.asarray, body(*operands.consts, *carry, *x))
        new, y = parts(list(outs), loop.carry_count)
        if active.ndim:
            new = [where(active, n, o) for n, o in zip(new, carry, strict=True)]
            y = [where(active, v, np.zeros_like(v)) for v in y]
        for stack, v, axis in zip(ys, y, loop.y_axes, strict=True):
            np.moveaxis(stack, axis, 0)[row] = v
        carry, step = new, step + 1
    return [*carry, *ys]


def assert_same(got, wanted, tol=RELATIVE["float64"]):
    for g, w in zip(got, wanted, strict=True):
        assert np.asarray(g).dtype == np.asarray(w).dtype
        np.testing.assert_allclose(g, w, rtol=tol, atol=tol)
