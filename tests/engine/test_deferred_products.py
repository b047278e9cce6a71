"""Deferred products: sums that are computed once a segment, and not added to in every step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from loopkit import _jax
from loopkit._engine.derivative import deferred_products
from loopkit._engine.derivative.deferred_products import put_off
from loopkit._engine.derivative.split import split_step
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import Operands, kept, parts
from loopkit._jaxprs import cost, equations, kernels
from tolerances import assert_near

from . import swept_loops
from .small_loops import make_loop

STEPS = 4
SIZE = 6


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    monkeypatch.setattr(deferred_products, "SMALLEST", 64)


def numbers(*shape, seed=0):
    return np.sin(1.3 * np.arange(np.prod(shape, dtype=int)) + seed).reshape(shape)


def dense(consts, carry, x):
    w, b = consts
    return [jnp.tanh(w @ carry[0] + b + x[0])], []


def transposed(consts, carry, x):
    w, b = consts
    return [jnp.tanh(carry[0] @ w.T) * b + x[0]], []


def used_twice(consts, carry, x):
    """Two products for one matrix."""
    w, b = consts
    return [jnp.tanh(w @ jnp.sin(w @ carry[0] + b)) + x[0]], []


def of_inputs(consts, carry, x):
    """One factor is a slice of the xs."""
    w, b = consts
    return [carry[0] * 0.5 + jnp.tanh(w @ x[0] + b * carry[0])], []


def reshaped(consts, carry, x):
    w, b = consts
    return [jnp.tanh(-w.reshape(-1).reshape(SIZE, SIZE) @ carry[0]) + b * x[0]], []


def of_matrices(consts, carry, x):
    """The carry is a batch of vectors: more is contracted than the steps."""
    w, b = consts
    return [jnp.tanh(carry[0] @ w + b) + x[0]], []


def scaled(consts, carry, x):
    """Add a product times something else."""
    w, b = consts
    return [jnp.tanh((w * b) @ carry[0]) + x[0]], []


def partly(consts, carry, x):
    """A product is added, and what is none."""
    w, b = consts
    return [jnp.tanh((w * b) @ carry[0]) + jnp.tanh(w @ carry[0]) + x[0]], []


def backward_of(body, shape=(SIZE,), length=STEPS, **how):
    """A loop, its backward half, and the operands of all of its steps."""
    init, xs = numbers(*shape), [numbers(length, SIZE, seed=3)]
    consts = [numbers(SIZE, SIZE, seed=1), numbers(SIZE, seed=2)]
    loop, operands = make_loop(body, consts, [init], xs, **how)
    active = forward_activity(loop, Operands([], [True, True], [True], [True]))
    split = split_step(loop, active)
    hoisted = _jax.call_jaxpr(split.hoist)(*operands.consts)
    forward, carry, rows = jax.jit(_jax.call_jaxpr(split.forward)), [init], []
    for step in range(length):
        outs = forward(*operands.consts, *carry, *(x[step] for x in xs))
        carry, stored = parts(outs, split.results)
        carry = carry[: loop.carry_count]
        rows.append(list(map(np.asarray, stored)))
    backward = split.backward(active, [False] * loop.carry_count)
    fixed = [*operands.consts, *map(np.asarray, hoisted)]
    return backward, fixed, xs, rows


def step_by_step(backward, fixed, xs, rows, sums, ct, keep):
    """The cotangents of `keep` of the outputs summed, the last carry's, the xs', and factors."""
    run = jax.jit(_jax.call_jaxpr(backward))
    d_xs, factors = [], []
    for step in reversed(range(len(rows))):
        outs = run(*fixed, *(x[step] for x in xs), *rows[step], *sums, ct)
        new, (ct,), d_x, kept_here = parts(outs, sum(keep), 1, len(xs))
        it = iter(new)
        sums = [np.asarray(next(it)) if k else s for s, k in zip(sums, keep, strict=True)]
        d_xs.append(list(map(np.asarray, d_x)))
        factors.append(list(map(np.asarray, kept_here)))
    stacked = [np.stack(v[::-1]) for v in zip(*factors, strict=True)]
    return sums, ct, d_xs, stacked


def products_of(body, first_of_rows=None, **how):
    backward, fixed, xs, rows = backward_of(body, **how)
    numbered = list(range(len(rows[0]))) if first_of_rows is None else first_of_rows
    found = put_off(backward, 2, len(fixed), len(fixed) + len(xs), numbered)
    return found, (backward, fixed, xs, rows)


BODIES = [
    (dense, (SIZE,)),
    (transposed, (SIZE,)),
    (used_twice, (SIZE,)),
    (of_inputs, (SIZE,)),
    (reshaped, (SIZE,)),
    (of_matrices, (2, SIZE)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("body", "shape"), BODIES, ids=lambda v: getattr(v, "__name__", ""))
def test_the_sums_of_all_steps(body, shape):
    found, (backward, fixed, xs, rows) = products_of(body, shape=shape)
    assert found.put_off[:2] == (True, False)
    assert not any(found.put_off[2:])
    sums, ct = [numbers(SIZE, SIZE, seed=5), numbers(SIZE, seed=6)], numbers(*shape, seed=7)
    wanted, last, d_xs, _ = step_by_step(backward, fixed, xs, rows, sums, ct, [True, True])

    keep = [not late for late in found.put_off[:2]]
    got, own, own_d_xs, factors = step_by_step(found.step, fixed, xs, rows, sums, ct, keep)
    assert [f.shape[1:] for f in factors] == [t.shape for t in found.factor_types]
    stacked = [np.stack(row) for row in zip(*rows, strict=True)]
    (late,) = found.sums(list(map(jnp.asarray, factors)), list(map(jnp.asarray, stacked)))
    assert_near(got[0] + late, wanted[0], atol=1e-12)
    assert_near(got[1], wanted[1])
    assert_near(own, last)
    assert_near(own_d_xs, d_xs)
    # No product as large as the matrix is left in a step, nor is one added.
    large = [e.primitive.name for e in equations.all_equations(found.step) if is_matrix(e)]
    assert not {"dot_general", "add_any"} & set(large)
    large = [e.primitive.name for e in equations.all_equations(backward) if is_matrix(e)]
    assert {"dot_general", "add_any"} <= set(large)


def is_matrix(eqn):
    return any(v.aval.shape in ((SIZE, SIZE), (SIZE * SIZE,)) for v in eqn.outvars)


def test_factors_that_are_rows_are_not_kept_twice():
    found, (backward, *_) = products_of(dense)
    # The carry is a row already; the cotangent of what the matrix makes is not.
    assert len(found.factors) == 1
    assert len(found.rows) == 1
    inputs = _jax.open_jaxpr(backward).invars
    assert set(found.rows).issubset(inputs)
    assert not set(found.factors) & set(inputs)
    elsewhere, _ = products_of(dense, first_of_rows=[None] * 2)
    assert len(elsewhere.factors) == 2
    assert elsewhere.rows == {}


def test_rows_have_the_numbers_that_they_are_given():
    plain, (backward, fixed, xs, rows) = products_of(dense)
    ((row, place),) = plain.rows.items()
    moved, _ = products_of(dense, first_of_rows=[10 + i for i in range(len(rows[0]))])
    assert list(moved.rows.values()) == [10 + place]
    before = len(fixed) + len(xs)
    assert _jax.open_jaxpr(backward).invars[before + place] is row


@pytest.mark.slow
def test_what_is_not_worth_it(monkeypatch):
    monkeypatch.setattr(deferred_products, "SMALLEST", SIZE * SIZE * 8)
    assert not any(products_of(dense)[0].put_off)
    monkeypatch.setattr(deferred_products, "SMALLEST", SIZE * SIZE * 8 - 1)
    assert any(products_of(dense)[0].put_off)
    # Of a batch of many vectors, the factors are larger than the matrix, read and written.
    assert any(products_of(of_matrices, shape=(2 * SIZE - 1, SIZE))[0].put_off)
    assert not any(products_of(of_matrices, shape=(2 * SIZE, SIZE))[0].put_off)


@pytest.mark.parametrize("body", [scaled, partly])
def test_what_is_no_sum_of_products_stays(body):
    found, (backward, *_) = products_of(body)
    assert not any(found.put_off)
    assert found.terms == ()
    assert found.factors == ()
    assert len(found.step.out_avals) == len(backward.out_avals)


def test_a_factor_that_never_changes():
    """If one factor is a constant, it is cheaper to sum the other."""

    def backward(u, row, total, ct):
        product = jax.lax.dot_general(u, ct, (((), ()), ((), ())))
        return [_jax.add_tangents(total, product), ct * row]

    types = [_jax.ShapedArray(s, jnp.dtype("float64")) for s in [(9,), (9,), (9, 9), (9,)]]
    jaxpr = _jax.trace_closed(backward, types, "backward")
    assert put_off(jaxpr, 1, 1, 1, [0]).put_off == (False, False)
    # As a row it is another for each step.
    assert put_off(jaxpr, 1, 0, 0, [0, 1]).put_off == (True, False)


def test_batched_products():
    """A batch axis of the product stays one."""

    def backward(row, total, ct):
        numbers = (((), ()), ((0,), (0,)))
        product = jax.lax.dot_general(row, ct, numbers)
        return [_jax.add_tangents(total, jnp.transpose(product, (2, 0, 1))), ct * 0.5]

    types = [_jax.ShapedArray(s, jnp.dtype("float64")) for s in [(2, 4), (5, 2, 4), (2, 5)]]
    jaxpr = _jax.trace_closed(backward, types, "backward")
    found = put_off(jaxpr, 1, 0, 0, [0])
    assert found.put_off == (True, False)
    rows, cts = numbers(STEPS, 2, 4), numbers(STEPS, 2, 5, seed=1)
    (got,) = found.sums([jnp.asarray(cts)], [jnp.asarray(rows)])
    assert_near(got, np.einsum("tbi,tbj->jbi", rows, cts))


def test_what_follows_a_sum_of_products():
    """It is done to each of them, in the same order."""

    def backward(row, total, ct):
        outer = lambda a, b: jax.lax.dot_general(a, b, (((), ()), ((), ())))
        products = _jax.add_tangents(outer(row, ct), outer(ct, row))
        return [_jax.add_tangents(total, -jnp.transpose(products).reshape(-1)), ct * 0.5]

    types = [_jax.ShapedArray(s, jnp.dtype("float64")) for s in [(5,), (25,), (5,)]]
    found = put_off(_jax.trace_closed(backward, types, "backward"), 1, 0, 0, [0])
    assert found.put_off == (True, False)
    rows, cts = numbers(STEPS, 5), numbers(STEPS, 5, seed=1)
    (got,) = found.sums([jnp.asarray(cts)], [jnp.asarray(rows)])
    once = np.einsum("ti,tj->ij", rows, cts)
    assert_near(got, -(once + once.T).ravel())


def test_the_step_keeps_what_is_not_put_off():
    found, (backward, *_) = products_of(dense)
    others = kept(backward.out_avals, [not late for late in found.put_off])
    assert list(found.step.out_avals) == [*others, *found.factor_types]
    assert list(found.step.in_avals) == list(backward.in_avals)


def test_factors_are_gone_before_the_loop_before_goes_back():
    def layer(h, w):
        q, k, v = jnp.split(h @ w["qkv"], 3, -1)
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        h = h + jnp.einsum("bqk,bkd->bqd", scores, v)
        return h + jax.nn.gelu(h @ w["up"]) @ w["up"].T, None

    def loss(w, words, h):
        h, _ = loopkit.scan(layer, h, w)
        total = lambda t, h: (t + jax.nn.logsumexp(h @ words, -1).sum(), None)
        return loopkit.scan(total, jnp.float32(0), h.reshape(-1, 128, 128))[0]

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = {"qkv": array(6, 128, 384), "up": array(6, 128, 512)}
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    program = gradient.lower(weights, array(128, 2000), array(8, 128, 128))
    factors = 8 * array(128, 2000).size * 4
    without = program.compile().memory_analysis().temp_size_in_bytes - factors
    assert without < (10e6 if _jax.KEEPS_BARRIERS else 16e6)


def test_stored_steps_are_summed_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(cost, "SMALLEST", 64)
    monkeypatch.setattr(kernels, "SUMMED", 2)
    loop, given = swept_loops.dense(checkpoints="all", cond=None, cond_consts=[])
    wanted = swept_loops.written_out(loop, given)
    for on_gpu in swept_loops.GPUS:
        found = swept_loops.assert_swept(loop, given, wanted, on_gpu)
        assert found.both.how.plan.summed == 2
        assert found.both.how.products is not None
        # A GPU, which would launch a kernel for each factor, reverses whole steps.
        assert found.runs["reversed"] == (8 if on_gpu[1] else 0)
