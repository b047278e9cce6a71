"""The bound that the predicate of a while loop has, and that none is guessed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._engine.steps import LAST_STEP
from loopkit._foreign import lax_loop
from turns import in_turn

TABLE = {
    "a counter": (lambda i, x: i < 10, 1, 0, (10, True)),
    "from elsewhere": (lambda i, x: i < 10, 1, 4, (6, True)),
    "beyond already": (lambda i, x: i < 10, 1, 14, (0, True)),
    "up to and with": (lambda i, x: i <= 10, 1, 0, (11, True)),
    "the limit first": (lambda i, x: jnp.asarray(10) > i, 1, 0, (10, True)),
    "downwards": (lambda i, x: i > 3, -1, 10, (7, True)),
    "downwards, with": (lambda i, x: i >= 3, -1, 10, (8, True)),
    "and something else": (lambda i, x: (x < 1e3) & (i < 10), 1, 0, (10, False)),
    "of two counters' tests": (lambda i, x: (i < 10) & (x < 1e3) & (i < 8), 1, 0, (8, False)),
    "in another integer": (lambda i, x: i.astype(jnp.int64) < 10, 1, 0, (10, True)),
    "or something else": (lambda i, x: (x < 1e3) | (i < 10), 1, 0, None),
    "not": (lambda i, x: ~(i > 9), 1, 0, (10, True)),
    "not, the limit first": (lambda i, x: ~(i >= 10), 1, 0, (10, True)),
    "not done": (lambda i, x: ~((i >= 10) | (x > 1e3) | (i > 7)), 1, 0, (8, False)),
    "not both": (lambda i, x: ~((i >= 10) & (x > 1e3)), 1, 0, None),
    "not yet, and not done": (lambda i, x: (x < 1e3) & ~(i >= 10), 1, 0, (10, False)),
    "not downwards": (lambda i, x: ~(i <= 3) & (x < 1e3), -1, 10, (7, False)),
    "the other way": (lambda i, x: (i < 10) & (x < 1e3), -1, 0, None),
    "two at a time": (lambda i, x: (i < 10) & (x < 1e3), 2, 0, (5, False)),
    "three at a time": (lambda i, x: i < 10, 3, 0, (4, True)),
    "three at a time, with": (lambda i, x: i <= 9, 3, 0, (4, True)),
    "three at a time downwards": (lambda i, x: i > 0, -3, 10, (4, True)),
    "three at a time, beyond already": (lambda i, x: i < 10, 3, 17, (0, True)),
    "as a float": (lambda i, x: (jnp.asarray(i, float) < 10.0) & (x < 1e3), 1, 0, None),
    "more than can be counted": (lambda i, x: (i < 2**40) & (x < 1e3), 1, 0, None),
    "a test of equality": (lambda i, x: (i != 10) & (x < 1e3), 1, 0, None),
    "through a narrower integer": (
        *(lambda i, x: (i.astype(jnp.int8) < 10) & (x < 1e3), 1, 0, None),
    ),
}


def bounds_of(f, *args):
    found = []
    bound_of = lax_loop.bound_of

    def noted(*args):
        found.append(bound_of(*args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax_loop, "bound_of", noted)
        jax.make_jaxpr(loopkit.checkpointed(lambda *args: f(*args)))(*args)
    return [found and tuple(found) for found in found]


@pytest.mark.parametrize("case", TABLE)
def test_bounds(case):
    test, by, first, wanted = TABLE[case]

    def f(x):
        start = jnp.asarray(first, jnp.int64), x
        return lax.while_loop(lambda c: test(*c), lambda c: (c[0] + by, c[1] * 1.5), start)[1]

    x = jnp.asarray(1.5)
    assert bounds_of(f, x) == [wanted]
    assert_close(loopkit.checkpointed(f)(x), f(x))
    assert_close(jax.grad(loopkit.checkpointed(f))(x), f(x) / x)


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE)
def test_bounds_of_own_loops(case):
    test, by, first, wanted = TABLE[case]

    def f(x, loops=loopkit):
        start = jnp.asarray(first, jnp.int64), x
        return loops.while_loop(lambda c: test(*c), lambda c: (c[0] + by, c[1] * 1.5), start)[1]

    x = jnp.asarray(1.5)
    if wanted != (0, True):  # of no steps there is no plan
        plan = loopkit.explain(f, x).plan
        assert (plan.bound, plan.exact) == (wanted or (None, False))
    assert_close(f(x), f(x, lax))
    assert_close(jax.grad(f)(x), f(x, lax) / x)
    assert_close(jax.jit(jax.grad(f))(x), f(x, lax) / x)


@pytest.mark.slow
@pytest.mark.parametrize("case", in_turn(TABLE, of=3))
def test_bounds_of_own_loops_with_buffers(case):
    """Their predicate is asked after each step, and never the only thing that says how many."""
    test, by, first, wanted = TABLE[case]

    def f(x, loops=loopkit, **how):
        start = jnp.asarray(first, jnp.int64), x, jnp.ones(3) * x
        step = lambda c: (c[0] + by, c[1] * 1.5, c[2].at[c[0] % 3].multiply(c[1]))
        _, y, z = loops.while_loop(lambda c: test(*c[:2]), step, start, **how)
        return jnp.log(y) + jnp.log(z).sum()

    with_buffer = lambda x: f(x, buffers=(False, False, True))
    x = jnp.asarray(1.5)
    plan = loopkit.explain(with_buffer, x).plan
    assert (plan.bound, plan.exact) == (max(1, wanted[0]) if wanted else None, False)
    assert_close(with_buffer(x), f(x, lax))
    assert_close(jax.jit(jax.grad(with_buffer))(x), jax.jit(jax.jacfwd(lambda x: f(x, lax)))(x))


def test_one_step_is_taken_before_a_predicate_is_asked_with_buffers():
    """So a limit that is passed at the start is a bound of one step, of which there is a plan."""

    def f(x):
        step = lambda c: (c[0] + 1, c[1].at[c[0] % 3].set(x))
        start, how = (9, jnp.ones(3)), {"buffers": (False, True)}
        return loopkit.while_loop(lambda c: c[0] < 5, step, start, **how)[1].sum()

    assert loopkit.explain(f, 0.5).plan.bound == 1
    assert f(0.5) == 3


@pytest.mark.slow
def test_a_limit_that_is_a_result_of_the_step():
    """A step may return another limit than it was given."""

    def f(x, **how):
        def step(c):
            i, n, swapped, b = c
            return i + 1, swapped, n, b.at[i].set(b[i - 1] * x)

        start = 0, 3, 7, jnp.ones(8) * x
        return loopkit.while_loop(lambda c: c[0] < c[1], step, start, **how)[3].sum()

    with_buffer = lambda x: f(x, buffers=lambda c: c[3])
    assert loopkit.explain(with_buffer, 0.5).plan.bound is None
    assert_close(jax.grad(with_buffer)(0.5), jax.grad(f)(0.5))


@pytest.mark.slow
def test_the_very_same_functions_from_several_starts(compilations):
    """Facts about a start are not part of what is cached for the functions."""
    test = lambda c: (c[0] < c[1]) & (c[2] < 1e3)
    step = lambda c: (c[0] + 1, c[1], c[2] * 1.01)

    def f(x, first, last):
        return loopkit.while_loop(test, step, (first, last, x))[2]

    for first, last in [(0, 40), (0, 33), (5, 40), (39, 40), (40, 40), (50, 40), (0, 64)]:
        assert_close(f(2.0, first, last), jnp.asarray(2.0 * 1.01 ** max(0, last - first)))
        assert_close(jax.grad(f)(2.0, first, last), jnp.asarray(1.01 ** max(0, last - first)))
    compilations.clear()
    for last in range(34, 64):  # as many steps as have been run, up to the next power of two
        jax.grad(f)(2.0, 0, last)
    assert compilations == []


@pytest.mark.slow
def test_own_bound_and_that_of_the_predicate():
    def whole(x, limit=20, **options):
        test = lambda c: (c[0] < limit) & (c[1] < 100.0)
        return loopkit.while_loop(test, lambda c: (c[0] + 1, c[1] * x), (0, x), **options)

    f = lambda x, **options: whole(x, **options)[1]
    x = jnp.asarray(1.5)
    bound = lambda **options: loopkit.explain(lambda x: f(x, **options), x).plan.bound
    assert [bound(max_steps=n) for n in (None, 7, 20, 1000)] == [20, 7, 20, 20]
    assert_close(jax.grad(lambda x: f(x, max_steps=3))(x), 4 * x**3)
    far = lambda x: f(x, limit=2**31 - 1, memory="1 MB")
    assert loopkit.explain(far, x).plan.bound is None, "no plan would heed it"
    _, info = whole(x, limit=5, return_info=True)
    assert (info.steps, info.stopped) == (5, True)
    with pytest.raises(Exception, match="`max_steps` must be enough"):
        f(x, max_steps=3, throw=True)
    f(x, limit=3, max_steps=3, throw=True)


@pytest.mark.parametrize("loops", [loopkit, lax], ids=["own", "replaced"])
def test_a_predicate_that_prints(loops, capfd):
    """It is asked before each step, and after the last."""

    def f(x):
        def test(c):
            jax.debug.print("asked {}", c[0])
            return c[0] < 3

        return loops.while_loop(test, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]

    how = loopkit.checkpointed(f) if loops is lax else f
    assert_close(jax.jit(how)(jnp.asarray(2.0)), jnp.asarray(16.0))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("asked") == 4


def powers(loops, x, **how):
    """Powers of `x` until one is above 100, and at most twenty of them."""
    test = lambda c: (c[0] < 20) & (c[1] < 100.0)
    return loops.while_loop(test, lambda c: (c[0] + 1, c[1] * x), (0, x), **how)[1]


@pytest.mark.slow
def test_everything_is_kept_without_max_steps():
    f, x = lambda x: powers(loopkit, x, checkpoints="all"), jnp.asarray(1.5)
    assert loopkit.explain(f, x).plan.keeps_all
    assert_close(jax.grad(f)(x), 12 * x**11)
    assert_close(jax.jit(jax.vmap(jax.grad(f)))(x[None]), 12 * x[None] ** 11)


def test_limits():
    def to(limit, first=0, moved=False):
        def f(x, n):
            top = n if limit is None else jnp.asarray(limit)
            step = lambda c: (c[0] + 1, c[1] * 1.5, c[2] - 1 if moved else c[2])
            test = lambda c: (c[0] < c[2]) & (c[1] < 1e3)
            return lax.while_loop(test, step, (jnp.asarray(first), x, top))[1]

        return f

    x, n = jnp.asarray(1.5), jnp.asarray(7)
    assert bounds_of(to(7), x, n) == [(7, False)]
    assert bounds_of(to(None), x, n) == [None]  # an argument
    assert bounds_of(to(7, moved=True), x, n) == [None]
    assert bounds_of(to(LAST_STEP), x, n) == [(LAST_STEP, False)]  # and no more are counted
    assert bounds_of(to(LAST_STEP + 1), x, n) == [None]
    down = lambda x: lax.while_loop(
        lambda c: (c[0] > 0) & (c[1] < 1e3),
        lambda c: (c[0] - jnp.uint8(1), c[1] * 1.5),
        (jnp.uint8(3), x),
    )[1]
    assert bounds_of(down, x) == [(3, False)]  # to the least that it holds
    floats = lambda x: lax.while_loop(
        lambda c: (c[0].astype(float) < c[2].astype(float)) & (c[1] < 1e3),
        lambda c: (c[0] + 1, c[1] * 1.5, c[2]),
        (0, x, 7),
    )[1]
    assert bounds_of(floats, x) == [None]  # which may be rounded
    closed = lambda x: lax.while_loop(
        lambda c: (c[0] < np.int64(9)) & (c[1] < 1e3), lambda c: (c[0] + 1, c[1] * 1.5), (0, x)
    )[1]
    assert bounds_of(closed, x) == [(9, False)]
    unknown = lambda x, n: lax.while_loop(
        lambda c: (c[0] < 9) & (c[1] < 1e3), lambda c: (c[0] + 1, c[1] * 1.5), (n, x)
    )[1]
    assert bounds_of(unknown, x, n) == [None]
    sometimes = lambda x: lax.while_loop(
        lambda c: (c[0] < 9) & (c[1] < 1e3),
        lambda c: (jnp.where(c[1] > 2, c[0] + 1, c[0]), c[1] * 1.5),
        (0, x),
    )[1]
    assert bounds_of(sometimes, x) == [None]


def test_all_is_kept_where_the_predicate_says_how_much():
    f, x = lambda x: powers(lax, x), jnp.asarray(1.5)
    assert_close(jax.grad(loopkit.checkpointed(f, checkpoints="all"))(x), 12 * x**11)
    endless = lambda x: lax.while_loop(lambda y: y < 100.0, lambda y: y * x, x)
    with pytest.raises(ValueError, match='can be "all" or a policy only if the number of'):
        jax.grad(loopkit.checkpointed(endless, checkpoints="all"))(x)


def test_a_bound_that_nobody_reaches_is_none_for_plans():
    """In loops of lax as in those of loopkit."""
    test = lambda c: (c[0] < 2**31 - 1) & (jnp.sum(c[1]) > 1e-3)
    of = lambda loop: lambda x: loop(test, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
    budgeted = lambda *given: loopkit.while_loop(*given, checkpoints=16)
    foreign = loopkit.checkpointed(of(lax.while_loop), checkpoints=16)
    plan = loopkit.explain(foreign, jnp.ones(100)).plan
    assert plan == loopkit.explain(of(budgeted), jnp.ones(100)).plan
    assert plan.bound is None


def test_a_smaller_max_steps_counts():
    f, x = lambda x: powers(lax, x), jnp.asarray(1.5)
    assert_close(loopkit.checkpointed(f, max_steps=3)(x), x**4)


def test_lanes_keep_their_own_tests():
    """A lane's own test bounds that lane alone."""

    def f(x, limit):
        test = lambda c: (c[0] < 6) & (c[1] < limit)
        return lax.while_loop(test, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1]

    xs, limits = jnp.asarray([1.0, 1.5, 30.0]), jnp.asarray([1e6, 4.0, 7.0])
    both = lambda f: jax.vmap(jax.value_and_grad(f))(xs, limits)
    assert_close(
        both(loopkit.checkpointed(f)),
        (jnp.vectorize(f)(xs, limits), jnp.asarray([1.5**6, 2.25 * 1.5, 1.0])),
    )


COUNTERS = {
    "uint8 downwards": ("uint8", 5, -1, lambda i: i >= 0),
    "uint32 downwards": ("uint32", 5, -1, lambda i: i >= 0),
    "uint8 as int32": ("uint8", 5, -1, lambda i: i.astype("int32") >= 0),
    "int8 up to all it holds": ("int8", 0, 1, lambda i: i <= 127),
    "uint8 up to all it holds": ("uint8", 0, 1, lambda i: i <= 255),
    "int8 below more than it holds": ("int8", 0, 1, lambda i: i.astype("int32") < 300),
    "int8 down to all it holds": ("int8", 5, -1, lambda i: i >= -128),
    "int32 up to all it holds": ("int32", 2**31 - 5, 1, lambda i: i <= 2**31 - 1),
    "uint8 until 255": ("uint8", 250, 1, lambda i: i < 255),
    "int8 until -128": ("int8", -120, -1, lambda i: i > -128),
    "int8 over its end": ("int8", 100, 20, lambda i: i < 127),
    "uint8 over its start": ("uint8", 100, -30, lambda i: i > 5),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_wraps_around_is_no_bound(name):
    dtype, first, by, test = COUNTERS[name]

    def f(x, while_loop):
        step = lambda c: (c[0] + jnp.asarray(by).astype(dtype), c[1] + 1)
        start = jnp.asarray(first, dtype), x
        return while_loop(lambda c: test(c[0]) & (c[1] < 500), step, start)[1]

    wanted = f(0.0, lax.while_loop)
    assert f(0.0, loopkit.while_loop) == wanted
    assert jax.jit(lambda x: f(x, loopkit.while_loop))(0.0) == wanted
    assert loopkit.checkpointed(lambda x: f(x, lax.while_loop))(0.0) == wanted


def test_a_counter_of_an_inner_loop():
    """An inner loop may move the counter: solvers test for convergence every ten iterations."""

    def f(x, start=0):
        def ten(c):
            step = lambda c, _: ((c[0] + 1, c[1] * 1.01), None)
            return lax.scan(step, c, None, 10)[0]

        return lax.while_loop(lambda c: (c[0] < 95) & (c[1] < 1e3), ten, (start, x))[1]

    assert bounds_of(f, 1.0) == [(10, False)]
    assert_close(jax.grad(loopkit.checkpointed(f, checkpoints="all"))(1.0), jax.jacfwd(f)(1.0))


def test_a_counter_of_floats_is_none():
    """It starts from an integer, and is promoted by what is added to it."""
    below = lambda c: c < jnp.int32(10).astype(jnp.result_type(c))
    assert loopkit.while_loop(below, lambda c: c + 1.5, 0) == 10.5
    pair = loopkit.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1.5, c[1]), (0, 10))
    assert pair[0] == 10.5
    f = lambda x: lax.while_loop(
        lambda c: below(c[0]) & (c[1] < 9), lambda c: (c[0] + 1.5, c[1] + 1), x
    )
    assert loopkit.checkpointed(f)((0.0, 0))[0] == f((0.0, 0))[0]
