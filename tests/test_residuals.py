"""Residuals: bytes that are kept between the forward and the backward pass.

A checkpointed loop keeps its arguments, a number of carries that does not depend on the number of
steps, and a few scalars. `jax.lax.scan`, beside it for comparison, keeps something of every step.
"""

import re

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit import Plan, _jax
from loopkit._engine.derivative.reversal import reversal

WIDTH = 256
CARRY = 8 * WIDTH
X = jnp.ones(WIDTH)
SCALARS = 8 * 40
"""Counters, flags, and the table of what is in which slot."""


def kept(f, *args):
    """Bytes of what jax.vjp keeps."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


def step(x):
    return jnp.sin(x) * jnp.cos(x)


def in_while(bound, checkpoints):
    cond = lambda c: (c[0] < bound) & (c[1][0] > -9.0)
    body = lambda c: (c[0] + 1, step(c[1]))
    return lambda x: loopkit.while_loop(
        cond, body, (0, x), max_steps=bound, checkpoints=checkpoints
    )[1]


def in_scan(length, checkpoints):
    return lambda x: loopkit.scan(
        lambda x, _: (step(x), None), x, length=length, checkpoints=checkpoints
    )[0]


def in_stopping_scan(length, checkpoints):
    return lambda x: loopkit.scan(
        lambda x, _: (step(x), jnp.sum(x)),
        x,
        length=length,
        until=lambda x, _: x[0] < -9.0,
        checkpoints=checkpoints,
    )[0]


def in_lax_scan(length):
    return lambda x: lax.scan(lambda x, _: (step(x), None), x, length=length)[0]


LOOPS = [in_while, in_scan, in_stopping_scan]


@pytest.mark.parametrize("checkpoints", [1, 4, 9])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_number_of_checkpoints(loop, checkpoints):
    few, many = kept(loop(100, checkpoints), X), kept(loop(10_000, checkpoints), X)
    assert few <= many <= (checkpoints + 1) * CARRY + SCALARS


def test_lax_keeps_every_step():
    assert kept(in_lax_scan(10_000), X) >= 10_000 * CARRY


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_by_default_about_the_square_root(loop):
    assert kept(loop(10_000, None), X) <= 3 * 100 * CARRY


def test_by_default_without_a_bound():
    f = lambda x: loopkit.while_loop(lambda x: x[0] > 0.1, step, x)
    assert kept(f, X) <= 200 * CARRY


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_all_keeps_what_lax_keeps(loop):
    assert kept(loop(50, "all"), X) <= 1.1 * kept(in_lax_scan(50), X) + CARRY + SCALARS + 50 * 16


NESTED = lambda x: loopkit.scan(
    lambda x, _: (in_while(10, 3)(x), None), x, length=100, checkpoints=4
)[0]
PLANNED = {
    "while_loop": (in_while(1000, None), X, 1),
    "while_loop, 6": (in_while(1000, 6), X, 1),
    "scan": (in_scan(1000, None), X, 1),
    "scan with until, 6": (in_stopping_scan(1000, 6), X, 1),
    "nested": (NESTED, X, 1),
    "vmapped": (jax.vmap(in_while(1000, 6)), jnp.ones((3, WIDTH)), 3),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", PLANNED)
def test_what_is_kept_is_what_is_planned(name):
    """Carries, the unit in each slot, the steps taken, and the arguments: no more.

    One of the arguments is the initial carry, of which there is no copy where slots are few.
    """
    f, x, lanes = PLANNED[name]
    jaxpr = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(f, x)[1]))(x)
    (forward,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "loopkit_forward"]
    loop, active = forward.params["loop"], forward.params["active"]
    how = reversal(loop, active)
    carry = sum(t.size * t.dtype.itemsize for t in how.slot_types)
    assert carry >= lanes * CARRY
    slots = how.plan.slots
    places = slots if how.plan.strategy == "schedule" else 0
    planned = (slots - (slots <= 16)) * carry + 4 * places + 4 * max(1, len(loop.lanes) and lanes)
    residuals = forward.outvars[loop.primal_counts[1] :]
    assert sum(v.aval.size * v.aval.dtype.itemsize for v in residuals) == planned
    arguments = sum(v.aval.size * v.aval.dtype.itemsize for v in forward.invars)
    assert planned < kept(f, x) <= planned + arguments + SCALARS


def test_in_lanes():
    lanes = jnp.ones((3, WIDTH))
    f = jax.vmap(in_while(1000, 4))
    assert kept(f, lanes) <= 3 * (5 * CARRY + SCALARS)
    per_lane = lambda n, x: loopkit.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (0, x), checkpoints=4
    )[1]
    f = jax.vmap(per_lane, (0, 0))
    assert kept(lambda x: f(jnp.asarray([1, 900, 7]), x), lanes) <= 3 * (5 * CARRY + SCALARS)


def test_a_batched_cotangent_keeps_one_trajectory():
    """jacrev keeps no more than one vjp does."""
    f = in_while(1000, 4)
    one = kept(f, X)
    many = kept(lambda x: jax.vmap(lambda s: s * x, out_axes=1)(jnp.ones(3)).sum(1), X)
    jaxpr = jax.make_jaxpr(lambda x, w: jax.vmap(jax.vjp(f, x)[1])(w))(X, jnp.ones((3, WIDTH)))
    largest = max(v.aval.size * 8 for eqn in jaxpr.eqns for v in eqn.outvars)
    assert largest <= max(one, many, 4 * CARRY)


@pytest.mark.parametrize("lengths", [(100, 10), (10, 100)], ids=str)
def test_nested(lengths):
    """The inner loop's residuals are not kept for each step of the outer."""
    outer, inner = lengths
    f = lambda x: loopkit.scan(
        lambda x, _: (in_while(inner, 3)(x), None), x, length=outer, checkpoints=4
    )[0]
    assert kept(f, X) <= 5 * CARRY + SCALARS


def test_in_a_scan_of_lax():
    """Each step of the outer scan keeps one loop's residuals."""
    f = lambda x: lax.scan(lambda x, _: (in_while(1000, 2)(x), None), x, length=5)[0]
    assert kept(f, X) <= 5 * (3 * CARRY + SCALARS) + CARRY


@pytest.mark.parametrize("mode", ["grad", "jvp"])
def test_derivatives_of_derivatives(mode):
    """The dual loop is a loop like any other."""

    def second(bound):
        f = lambda x: jnp.sum(in_while(bound, 3)(x))
        if mode == "grad":
            return jax.grad(f)
        return lambda x: jax.jvp(f, (x,), (jnp.ones(WIDTH),))[1]

    assert kept(second(100), X) == kept(second(10_000), X) <= 14 * CARRY + 2 * SCALARS


# ---------------------------------------------------------------- what need not be kept


def test_constants_are_kept_once():
    matrix = jnp.eye(WIDTH)

    def f(x, matrix):
        body = lambda c: (c[0] + 1, jnp.sin(matrix @ c[1]))
        return loopkit.while_loop(lambda c: c[0] < 9, body, (0, x), checkpoints=4)[1]

    assert kept(f, X, matrix) <= matrix.nbytes + 5 * CARRY + SCALARS


def test_leaves_that_never_change_are_kept_once():
    matrix = jnp.eye(WIDTH)

    def f(x, matrix):
        body = lambda c: (c[0] + 1, jnp.sin(c[2] @ c[1]), c[2])
        return loopkit.while_loop(lambda c: c[0] < 9, body, (0, x, matrix), checkpoints=4)[1]

    assert kept(f, X, matrix) <= 2 * matrix.nbytes + 5 * CARRY + SCALARS


def test_all_does_not_store_constants_for_every_step():
    matrix = jnp.eye(WIDTH)

    def keeping(scan, **kwargs):
        f = lambda x, matrix: scan(
            lambda x, _: (jnp.sin(matrix @ x), None), x, length=20, **kwargs
        )[0]
        return kept(f, X, matrix)

    assert keeping(loopkit.scan, checkpoints="all") <= 1.1 * keeping(lax.scan) + SCALARS


def test_xs_are_kept_once():
    xs = jnp.ones((1000, WIDTH))
    f = lambda x, xs: loopkit.scan(lambda x, row: (jnp.sin(x * row), None), x, xs, checkpoints=4)[0]
    assert kept(f, X, xs) <= xs.nbytes + 5 * CARRY + SCALARS


def test_unread_leaves_are_not_kept():
    """A large leaf that the result does not depend on."""

    def f(x, large):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]), c[2] * 2)
        return loopkit.while_loop(lambda c: c[0] < 9, body, (0, x, large), checkpoints=4)[1]

    large = jnp.ones(100 * WIDTH)
    assert kept(f, X, large) <= 2 * large.nbytes + 5 * CARRY + SCALARS


# ---------------------------------------------------------------- as jax reports it


def test_print_saved_residuals(capsys):
    """No line of the report has an axis as long as the loop."""
    f = lambda x: jnp.sum(in_scan(10_000, 4)(x))
    jax.ad_checkpoint.print_saved_residuals(f, X)
    report = capsys.readouterr().out
    shapes = re.findall(r"^[a-z]+\d*\[([\d,]*)\]", report, re.MULTILINE)
    assert shapes
    for shape in shapes:
        assert all(int(size) <= WIDTH for size in shape.split(",") if size), report


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_while, in_scan], ids=lambda loop: loop.__name__)
def test_memory_of_the_compiled_gradient(loop):
    """Memory is the same for 100 steps and for 10000; the scan of lax stores a row for each."""

    def temporary(f):
        compiled = jax.jit(jax.grad(lambda x: jnp.sum(f(x)))).lower(X).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(loop(100, 4)), temporary(loop(10_000, 4))
    assert many <= 1.2 * few + 16 * CARRY
    assert many <= 200 * CARRY
    assert temporary(loop(10_000, None)) <= 1000 * CARRY
    assert temporary(in_lax_scan(10_000)) >= 10_000 * CARRY


@pytest.mark.skipif(not _jax.KEEPS_BARRIERS, reason="this compiler drops barriers before it fuses")
@pytest.mark.parametrize("unknown", [False, True])
def test_a_residual_is_computed_once_going_back(unknown):
    """The cosine is read by two kernels, in neither of which it is computed again."""

    def f(p, x):
        def body(s):
            return s[0] + 1, s[1] + 0.1 * jnp.sin(p * s[1])

        bound = None if unknown else 1000
        plan = loopkit.Plan(slots=32, segment=32)
        start = jnp.int32(0), x
        done = loopkit.while_loop(
            lambda s: s[0] < 1000, body, start, max_steps=bound, checkpoints=plan
        )
        return jnp.sum(done[1])

    compiled = jax.jit(jax.grad(f, (0, 1))).lower(X, X).compile()
    assert compiled.as_text().count(" cosine(") == 1


@pytest.mark.parametrize("checkpoints", [None, 5, "all", Plan(8, 5, "residuals", keeps_last=4)])
def test_results_that_nobody_reads_take_no_memory(checkpoints):
    """As in lax, where the compiler drops them. The sweep of segments has a loop in a loop."""

    def loss(x, scan=loopkit.scan, **how):
        step = lambda c, x: ((c[0] * jnp.cos(c[0][0]), c[1] + c[0] * x), jnp.tile(c[0], 40))
        return jnp.sum(scan(step, (x, x), jnp.ones(60), **how)[0][0])

    slope = jax.jit(jax.grad(lambda x: loss(x, checkpoints=checkpoints)))
    needed = slope.lower(X).compile().memory_analysis().temp_size_in_bytes
    assert needed < 60 * 40 * CARRY
    assert_close(slope(X), jax.grad(lambda x: loss(x, lax.scan))(X))
    again = lambda slope: jax.grad(lambda x: jnp.sum(jnp.sin(slope(x))))(X)
    assert_close(again(slope), again(jax.grad(lambda x: loss(x, lax.scan))))
