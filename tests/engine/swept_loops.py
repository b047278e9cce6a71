"""Loops swept there and back without compiling, against the same steps written out."""

import contextlib
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._buffers.slices import read, write
from loopkit._buffers.window import Window
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Operands, kept, parts
from loopkit._engine.sweeps import sweeps
from loopkit._jaxprs import equations
from loopkit.schedules import binomial
from loopkit.schedules.online import NEVER

from .small_loops import assert_same, make_loop


def worst(aval, after=0, fill=0):
    """NaN, or the largest integers."""
    kind = aval.dtype
    value = jnp.nan if jnp.issubdtype(kind, jnp.inexact) else True
    value = jnp.iinfo(kind).max if jnp.issubdtype(kind, jnp.integer) else value
    return jnp.full(aval.shape, value, kind)


@contextlib.contextmanager
def step_by_step(on_gpu=False):
    """Run a loop step by step, as on a GPU or elsewhere; memory that is read before it is written
    is `worst`.

    Given is a counter of the jaxprs that are evaluated, by identity.
    """
    runs, call = Counter(), _jax.call_jaxpr

    def counting(jaxpr):
        runs[id(jaxpr)] += 1
        return call(jaxpr)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit(), _jax.host_waits(on_gpu):
        patch.setattr(_jax, "blank", worst)
        patch.setattr(_jax, "written", worst)
        patch.setattr(_jax, "blank_on_host", lambda t: _jax.placed(worst(t), t))
        patch.setattr(_jax, "call_jaxpr", counting)
        yield runs


class Swept(NamedTuple):
    """The result of a sweep, and the steps that it ran."""

    both: Any
    """The strategy, as it goes back."""
    results: list
    residuals: list
    cotangents: list
    runs: Counter
    """Steps going back: "again" to get to others, "replayed", "reversed"."""
    taken: int
    """Steps going forward, without their residuals; also those that do not count."""


def there_and_back(loop, given, on_gpu=(False, False), batch=None):
    """`on_gpu`: there, and back. `batch`: of cotangents, each -2 times the one before."""
    active = forward_activity(loop, moving(loop))
    how = reversal(loop, active)
    operands = loop.split(list(map(jnp.asarray, given.flat)))[0]
    cts = cotangents_of(loop, active)
    if batch is not None:
        cts = [jnp.stack([(-2.0) ** k * v for k in range(batch)]) for v in cts]
    with step_by_step(on_gpu[0]) as there:
        outs = sweeps(how).forward(loop, operands)
    results, residuals = parts(outs, loop.carry_count + loop.ys_count)
    with step_by_step(on_gpu[1]) as runs:
        both = sweeps(how)
        found = both.backward(operands, residuals, cts, batch)
    how = both.how
    jaxprs = {"again": how.step, "replayed": how.forward, "reversed": how.backward}
    counts = Counter({name: runs[id(jaxpr)] for name, jaxpr in jaxprs.items()})
    return Swept(both, results, residuals, found, counts, there[id(loop.body)])


def cotangents_of(loop, active):
    types = loop.output_types(active)
    return [jnp.cos(jnp.arange(float(t.size)) + 0.5).reshape(t.shape) for t in types]


def steps_of(loop, given):
    """Return the number of steps taken."""
    carry, step = given.init, 0
    while loop.length is None or step < loop.length:
        if loop.cond is not None and not _jax.call_jaxpr(loop.cond)(*given.cond_consts, *carry)[0]:
            break
        x = slices(loop, given.xs, step)
        carry = _jax.call_jaxpr(loop.body)(*given.consts, *carry, *x)[: loop.carry_count]
        step += 1
    return step


def row_of(loop, step):
    return loop.length - 1 - step if loop.reverse else step


def slices(loop, xs, step):
    pairs = zip(xs, loop.x_axes, strict=True)
    return [jnp.take(v, row_of(loop, step), axis) for v, axis in pairs]


def written_out(loop, given, cts=None):
    """Results, and cotangents of the inputs that move, of steps without lanes."""
    active = forward_activity(loop, moving(loop))
    inputs = [*given.consts, *given.init, *given.xs]
    taken = steps_of(loop, given)

    def unrolled(*values):
        values = spread(values, active.inputs, inputs)
        consts, carry, xs = parts(values, loop.const_count, loop.carry_count)
        carry = list(map(jnp.asarray, carry))
        ys = [jnp.zeros(t.shape, t.dtype) for t in loop.ys_types] if loop.ys_count else []
        for step in range(taken):
            outs = _jax.call_jaxpr(loop.body)(*consts, *carry, *slices(loop, xs, step))
            carry, y = parts(outs, loop.carry_count)
            at = [(slice(None),) * axis + (row_of(loop, step),) for axis in loop.y_axes]
            ys = [v.at[i].set(row) for v, i, row in zip(ys, at, y, strict=True)]
        return kept([*carry, *ys], active.outputs), [*carry, *ys]

    moved = list(map(jnp.asarray, kept(inputs, active.inputs)))
    _, back, results = jax.vjp(unrolled, *moved, has_aux=True)
    return results, back(cotangents_of(loop, active) if cts is None else cts)


def programs(loop, given, on_gpu):
    """Jaxprs of the sweeps."""
    both_of = lambda: sweeps(reversal(loop, active))
    active = forward_activity(loop, moving(loop))
    with _jax.host_waits(on_gpu):
        forward = lambda *values: both_of().forward(loop, loop.split(values)[0])
        there = jax.make_jaxpr(forward)(*given.flat)
        residuals, cts = both_of().residual_types, cotangents_of(loop, active)
        backward = lambda v, r, cts: both_of().backward(loop.split(v)[0], r, cts, None)
        return there, jax.make_jaxpr(backward)(given.flat, residuals, cts)


def loops_of(program):
    """Say for each loop of a program whether its length is known."""
    whiles = [e for e in equations.all_equations(program) if e.primitive.name == "while"]
    return [isinstance(_length_of(e), _jax.Literal) for e in whiles]


def loops_there(loop, given, on_gpu):
    return loops_of(programs(loop, given, on_gpu)[0])


def loops_back(loop, given, on_gpu):
    return loops_of(programs(loop, given, on_gpu)[1])


def _length_of(eqn):
    """Return the limit of a counter of iterations, if the predicate tests nothing else."""
    eqns = eqn.params["cond_jaxpr"].eqns
    return eqns[0].invars[1] if [e.primitive.name for e in eqns] == ["lt"] else None


GPUS = [(False, False), (True, True)]
MIXED = [(True, False), (False, True)]


def assert_swept(loop, given, wanted=None, on_gpu=(False, False), batch=None):
    """Results and cotangents are those of `written_out`, and so is what the sweeps hand over."""
    results, cotangents = wanted or written_out(loop, given)
    found = there_and_back(loop, given, on_gpu, batch)
    assert_same(found.results, results)
    several = [found.cotangents] if batch is None else zip(*found.cotangents, strict=True)
    for k, of_one in enumerate(several):
        assert_same(of_one, [(-2.0) ** k * v for v in cotangents])
    kind = lambda t: (t.shape, t.dtype)
    types = list(map(jax.typeof, found.residuals))
    assert list(map(kind, types)) == list(map(kind, found.both.residual_types))
    assert types[-1].weak_type == found.both.residual_types[-1].weak_type
    return found


def climbed(held, slots, segments):
    """Segments that are run to get to each of them, last one first, from those that are held."""
    held, total = set(held), 0
    for target in reversed(range(segments)):
        at = max(segment for segment in held if segment <= target)
        while at < target:
            free = slots - len(held)
            run = binomial.split(target + 1 - at, free)
            at, total = at + run, total + run
            held |= {at} if free else set()
        held = {segment for segment in held if segment < target}
    return total


def run_again(found, steps):
    """Steps that lead to a segment, and those run within segments to have their carries."""
    plan, laid = found.both.how.plan, found.both.layout_plan
    wider = plan.segment // laid.segment
    segments = found.residuals[-2][: plan.slots].tolist()
    held = [segment // wider for segment in segments if segment != NEVER and segment % wider == 0]
    count = -(-steps // plan.segment)
    within = steps - count if plan.store == "carries" else 0
    return climbed(held, plan.slots, count) * plan.segment, within


LENGTH = 7
TAKEN = 5


def chain(consts, carry, x):
    """A chain in a matrix, a counter, and an accumulator, of which nothing is saved."""
    (w, scale), (h, n, total), (a,) = consts, carry, x
    h = jnp.sin(h @ w + a * n)
    return [h, n + 1, total + h.sum()], [h * scale, n]


def _operands(length):
    w = np.cos(np.arange(9.0)).reshape(3, 3)
    init = [np.array([0.3, -0.2, 0.5]), 1, 0.0]
    return [w, 0.7], init, [np.sin(np.arange(3.0 * length)).reshape(3, length)]


def known(length=LENGTH, **settings):
    return make_loop(chain, *_operands(length), x_axes=[1], y_axes=[1, 0], **settings)


def decided(length=LENGTH, taken=TAKEN, **settings):
    """Fewer steps than its length."""
    below = lambda limit, carry: carry[1] < limit[0]
    how = {"cond": below, "cond_consts": [taken + 1], **settings}
    return make_loop(chain, *_operands(length), x_axes=[1], y_axes=[1, 0], **how)


def unbounded(taken=TAKEN, **settings):
    """Without a length, and so without xs and ys."""

    def body(consts, carry, x):
        (w, scale), (h, n) = consts, carry
        return [jnp.sin(h @ w + scale * n), n + 1], []

    consts, (h, n, _), _ = _operands(taken)
    below = lambda limit, carry: carry[1] < limit[0]
    return make_loop(body, consts, [h, n], cond=below, cond_consts=[taken + 1], **settings)


SIZE = 6


def dense(**settings):
    """Five steps of eight, each with a product that is worth putting off."""

    def body(consts, carry, x):
        (w,), (h, n) = consts, carry
        return [jnp.tanh(w @ h + x[0]), n + 1], [h]

    numbers = lambda *shape: np.sin(np.arange(float(np.prod(shape)))).reshape(shape)
    below = lambda limit, carry: carry[1] < limit[0]
    how = {"cond": below, "cond_consts": [TAKEN], **settings}
    return make_loop(body, [numbers(SIZE, SIZE)], [numbers(SIZE), 0], [numbers(8, SIZE)], **how)


ROW = Window((0,), (0, 0), (1, 2), "drop", wrap=False)


def in_row(i):
    return jnp.asarray(i)[None]


def rewriting(length=LENGTH, taken=None, **settings):
    """The rows of a buffer, read and written over and over: what was there is logged.

    The first row is read each time, and stays as it is.
    """

    def body(consts, carry, x):
        (w,), (n, b, h) = consts, carry
        first, b = read(b, in_row(0), ROW)
        old, b = read(b, in_row(1 + (n + 1) % 3), ROW)
        b = write(b, jnp.sin(old * w + h + x[0] + first), in_row(1 + n % 3), ROW)
        new, b = read(b, in_row(1 + n % 3), ROW)
        return [n + 1, b, h * jnp.cos(new.sum())], []

    rows = np.sin(np.arange(160.0)).reshape(80, 2)
    below = lambda limit, carry: carry[0] < limit[0]
    how = {} if taken is None else {"cond": below, "cond_consts": [taken]}
    xs = [np.cos(np.arange(float(length)))]
    return make_loop(body, [0.7], [0, rows, 0.3], xs, buffers=[1], **how, **settings)


def moving(loop):
    """All numbers that are not integers, and not the predicate's."""
    inexact = lambda types: [jnp.issubdtype(t.dtype, jnp.inexact) for t in types]
    none = [False] * loop.cond_const_count
    return Operands(none, *map(inexact, (loop.const_types, loop.carry_types, loop.xs_types)))
