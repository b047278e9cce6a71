"""Buffers that checkpoints leave out: what steps log, and when."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from buffer_bodies import BODIES, XS, W, looped, ring, rows_from_rows, viterbi
from derivatives import assert_close
from loopkit import Plan, _jax
from loopkit._engine.derivative.write_log import find_undo
from loopkit._engine.primitives import while_p


def the_loop(f, *args):
    """The loop in a function that has one."""
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is while_p:
                found.append(eqn.params["loop"])
            elif "jaxpr" in eqn.params:
                look(_jax.open_jaxpr(eqn.params["jaxpr"]))

    look(_jax.open_jaxpr(jax.make_jaxpr(f)(*args)))
    assert len(found) == 1
    return found[0]


def log_of(f, *args):
    """(dtype, shape) of what a step logs."""
    loop = the_loop(f, *args)
    undo = find_undo(loop, [True] * loop.carry_count)
    return None if undo is None else [(str(t.dtype), t.shape) for t in undo.log_types]


def displaced(log):
    return [shape for dtype, shape in log if dtype == "float64"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_checkpoints_hold_no_buffer(body):
    f = looped(body, "scan", Plan(3, 2, "residuals"))
    text = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(XS, W))
    assert "f64[46,2]" in text
    assert "f64[3,46,2]" not in text


def test_what_is_displaced_is_logged():
    assert displaced(log_of(looped(ring, "scan", None), XS, W)) == [(1, 2), (1, 2)]
    assert displaced(log_of(looped(rows_from_rows, "while", None), XS, W)) == [(1, 2)] * 3
    unbounded = looped(ring, "while", None, max_steps=None)
    assert displaced(log_of(unbounded, XS, W)) == [(1, 2)] * 2, "the predicate bounds the steps"
    assert log_of(unbounded, XS, W, jnp.int32(6)) is None


def test_rows_written_once_displace_nothing():
    for kind in ("scan", "fori", "while"):
        assert displaced(log_of(looped(viterbi, kind, None), XS, W)) == []


def written(at, length=10, rows=10, mode=None, by=1, start=0):
    def f(ys):
        def body(c, _):
            i, k, ys = c
            return (i + by, k + 1, ys.at[at(i, k)].set(jnp.sin(ys[0]).sum(), mode=mode)), None

        init = (start, jnp.arange(2).sum(), ys)
        return loopkit.scan(body, init, None, length, buffers=lambda c: c[2])[0][2]

    return displaced(log_of(f, jnp.ones((rows, 2))))


def test_only_rows_that_are_provably_written_once():
    assert written(lambda i, k: i) == []
    assert written(lambda i, k: i + 3) == []
    assert written(lambda i, k: 3 + i) == []
    assert written(lambda i, k: i - 1, length=20, rows=30, start=1) == []
    assert written(lambda i, k: i, by=-1) == []
    assert written(lambda i, k: (i, slice(None))) == []
    assert written(lambda i, k: (i, k // 2)) == []
    assert written(lambda i, k: i, length=11) == [(1, 2)], "it may come around"
    assert written(lambda i, k: i, mode="clip") == [(1, 2)], "rows at the end are written again"
    assert written(lambda i, k: 5 - i, length=11, start=5) == [(1, 2)], "it comes around"
    assert written(lambda i, k: i // 2) == [(1, 2)]
    assert written(lambda i, k: i, by=2) == [(1, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", [Plan(2, 2, "residuals"), Plan(1), "all"], ids=range(3))
def test_inner_loops_log_too(checkpoints):
    """The edit distance of two words, softened; the table is filled by two loops."""

    def table(t, xs, cell, rows):
        t = t.at[0].set(xs[:, 0])
        for i in rows:
            for j in rows:
                t = cell(i, j, t, xs)
        return jnp.sum(t[:6] ** 2)

    def cell(i, j, t, xs):
        best = jnp.logaddexp(t[i - 1, j] + 1, t[i, j - 1] * t[i, j])
        return t.at[i, j].set(best + xs[i, 0] * xs[j, 1]).at[0, 0].add(best)

    def looped(xs):
        def row(i, t):
            return loopkit.fori_loop(1, 6, lambda j, t: cell(i, j, t, xs), t)

        t = jnp.zeros((90, 6)).at[0].set(xs[:, 0])
        t = loopkit.fori_loop(1, 6, row, t, buffers=True, checkpoints=checkpoints)
        return jnp.sum(t[:6] ** 2)

    if checkpoints != "all":
        text = str(jax.make_jaxpr(jax.grad(looped))(XS))
        assert f"f64[{checkpoints.slots},90,6]" not in text
    wanted = lambda xs: table(jnp.zeros((90, 6)), xs, cell, range(1, 6))
    assert_close(jax.jit(jax.value_and_grad(looped))(XS), jax.value_and_grad(wanted)(XS))
    xs = jnp.stack([XS, XS * 2])
    batch = lambda f: jax.vmap(jax.grad(f))(xs)
    assert_close(jax.jit(lambda: batch(looped))(), batch(wanted))


def test_a_buffer_may_be_anywhere_in_an_inner_loops_carry():
    def f(rows):
        def step(j, c):
            return jnp.sin(c[0]), jnp.cos(c[1]), c[2].at[j].set(c[0] * c[2][j - 1])

        outer = lambda i, c: loopkit.fori_loop(0, 3, step, c)
        init = rows[0], rows[1], rows
        return loopkit.fori_loop(0, 4, outer, init, buffers=lambda c: c[2])[2]

    assert displaced(log_of(f, jnp.ones((90, 2)))) == [(3, 1, 2)]


def test_a_body_that_makes_another_buffer_is_saved():
    """Nothing else than reads and writes can be taken back."""

    def f(rows):
        def body(i, c):
            a, b = c
            return b, a.at[i].set(jnp.sin(b[i]))

        return loopkit.fori_loop(0, 5, body, (rows, rows * 2), buffers=(True, True))

    loop = the_loop(f, jnp.ones((90, 2)))
    assert find_undo(loop, [True] * loop.carry_count) is None


@pytest.mark.slow
def test_memory_budgets_count_the_log():
    grad = lambda **how: jax.grad(
        lambda x: loopkit.scan(
            lambda c, _: ((c[0] + 1, c[1].at[c[0] % 9].set(jnp.sin(c[1][(c[0] + 1) % 9]))), None),
            (0, jnp.ones((200, 8)) * x),
            None,
            300,
            buffers=lambda c: c[1],
            **how,
        )[0][1].sum()
    )
    want = grad(checkpoints="all")(2.0)
    for memory in ("40 kB", "80 kB", "1 MB"):
        assert_close(jax.jit(grad(memory=memory))(2.0), want)
    with pytest.raises(ValueError, match="`memory` must be at least"):
        grad(memory=1000)(2.0)


@pytest.mark.slow
def test_batches_of_which_more_moves_than_the_gradient_is_of():
    """The loop is run forward again, and what it logs is laid out anew."""

    def f(w, x, table):
        def step(i, carry):
            rows, s = carry
            rows = rows.at[i % 2].set(jnp.sin(rows[(i + 1) % 2]) * jnp.sum(s) * w)
            return rows, jnp.tanh(s * x)

        carry, n = (table(jnp.ones((3, 2)) * w), x), jnp.sum(x > 0) + 1
        if table is loopkit.Buffer:
            how = {"max_steps": 2, "buffers": lambda c: c[0], "checkpoints": Plan(1)}
            rows, s = loopkit.fori_loop(0, n, step, carry, **how)
        else:
            once = step(0, carry)
            carry = jax.tree.map(lambda a, b: jnp.where(n > 1, a, b), step(1, once), once)
            rows, s = carry
        return jnp.sum(jnp.sin(rows) * s)

    args = jnp.asarray([[0.3, 0.7], [0.4, -0.2]]), jnp.asarray([[1.0, -1.2], [-0.5, -0.8]])

    def along(table):
        slope = jax.vmap(jax.grad(lambda w, x: f(w, x, table), 1))
        return jax.jvp(slope, args, jax.tree.map(jnp.cos, args))

    assert_close(jax.jit(lambda: along(loopkit.Buffer))(), along(jnp.asarray))


@pytest.mark.parametrize("plan", [Plan(2, 2), Plan(2, 3, "residuals"), 3], ids=range(3))
def test_an_entry_that_a_step_writes_twice_is_undone_from_last_to_first(plan):
    def f(x, loop, **how):
        def step(c):
            i, table = c
            before = table[3]
            table = table.at[3].set(jnp.sin(before * x) + 0.1)
            return i + 1, table.at[3].set(jnp.cos(table[3]) * x + before * table[3])

        start = jnp.int32(0), jnp.arange(40.0) / 50 + x
        return jnp.sum(loop(lambda c: c[0] < 9, step, start, **how)[1])

    def in_python(goes_on, step, value):
        while goes_on(value):
            value = step(value)
        return value

    how = {"max_steps": 12, "checkpoints": plan, "buffers": lambda v: v[1]}
    looped = lambda x: f(x, loopkit.while_loop, **how)
    assert loopkit.explain(looped, 0.7).plan.step.log_bytes
    assert_close(jax.grad(looped)(0.7), jax.grad(lambda x: f(x, in_python))(0.7))
