"""Trials of steps to an iteration: of which loops, of how many steps, and by which clock."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._engine.loop import Active, parts
from loopkit._engine.primitives import while_p
from loopkit._engine.trials import unrolling, user_cache
from loopkit._engine.trials.unrolling import STEPS, Trial

from .small_loops import assert_same, make_loop, run


def sines(length=10, work=1, **settings):
    def body(consts, carry, x):
        (y,) = carry
        for _ in range(work):
            y = jnp.sin(y)
        return [y * consts[0]], []

    return make_loop(body, [0.9], [jnp.ones((30, 100))], length=length, **settings)[0]


def halves(step=lambda y: y / 2, ask=lambda y: y > 1.0, carry=(64.0,), **settings):
    """A loop with a predicate; both are given the first of the carry."""
    body = lambda consts, carry, x: ([step(carry[0]), *carry[1:]], [])
    return make_loop(body, [], carry, cond=lambda _, carry: ask(carry[0]), **settings)[0]


def test_what_can_be_tried(monkeypatch):
    assert unrolling._can_be_tried(sines())
    assert unrolling._can_be_tried(sines(length=1))
    assert unrolling._can_be_tried(halves()), "of scalars, without a bound"
    assert not unrolling._can_be_tried(sines(length=0))
    assert not unrolling._can_be_tried(halves(carry=(64.0, jnp.ones(3)), buffers=[1]))
    monkeypatch.setattr(_jax, "is_spread", lambda t: t.ndim == 2)
    assert not unrolling._can_be_tried(sines()), "one of its leaves is on several devices"


def said(y):
    jax.debug.print("at {}", y)
    return y / 2


@pytest.mark.parametrize("part", ["step", "ask"])
def test_what_made_up_values_are_no_good_for(part):
    """In the step alone, or in the predicate alone."""
    own = {"step": lambda y: y, "ask": lambda y: y > 1.0}[part]
    for does in (
        lambda y: jax.pure_callback(lambda y: y / 2, y, y),
        lambda y: jax.lax.while_loop(lambda y: y > 1, lambda y: y / 2, y),
        *([said] if part == "step" else []),
    ):
        assert not unrolling._can_be_tried(halves(**{part: lambda y, does=does: own(does(y))}))


def test_what_is_too_large_is_not_tried(monkeypatch):
    rows = make_loop(lambda c, carry, x: ([carry[0] + x[0]], []), [], [0.5], [jnp.ones(100)])[0]
    monkeypatch.setattr(unrolling, "LARGEST", 100 * 8 + 16)  # all rows, what a step is given
    assert unrolling._can_be_tried(rows)
    monkeypatch.setattr(unrolling, "LARGEST", 100 * 8 + 15)
    assert not unrolling._can_be_tried(rows)


def test_not_of_a_size_that_nobody_knows():
    (n,) = jax.export.symbolic_shape("n")
    types = [_jax.ShapedArray((), jnp.dtype(float)), _jax.ShapedArray((2, n), jnp.dtype(float))]
    body = _jax.trace_closed(lambda w, y: [jnp.sin(y) * w], types, "step")
    assert not unrolling._can_be_tried(sines().replace(body=body))


def test_steps_that_are_expected():
    expected = unrolling._expected_steps
    assert expected(sines(10**7)) == 10**7
    assert expected(halves(length=10**7)) == STEPS, "it may stop before its bound"
    assert expected(halves(length=7)) == 7
    assert expected(halves()) == STEPS


def test_what_cannot_be_tried_is_not_unrolled(monkeypatch):
    monkeypatch.setattr(unrolling, "measure", None)
    assert unrolling.settled(sines(0, auto_unroll=True)) == 1
    assert unrolling.settled(sines(5, unroll=3)) == 3


def test_steps_of_a_trial():
    length = unrolling._trial_length
    assert length(sines(5)) == 5
    assert length(sines(10**7, work=1000)) == 32, "each count has an iteration and more"
    scalar = make_loop(lambda consts, carry, x: ([carry[0] + 1.0], []), [], [0.5], length=10**7)[0]
    assert length(scalar) == STEPS
    assert 32 < length(sines(10**7, work=3)) < STEPS


def test_no_more_steps_to_an_iteration_than_there_are(monkeypatch):
    monkeypatch.setattr(unrolling, "measure", lambda loop, active, count: Trial(0.0, 1.0 / count))
    for steps, tried in ((1, "1"), (4, "1 2 4"), (5, "1 2 4"), (100, "1 2 4 8 16")):
        assert list(unrolling._try_all(sines(steps), None, steps)["seconds"]) == tried.split()


def found(monkeypatch, *trials, noise=1.5):
    """What is chosen, and how many are tried, of which each takes so many seconds: to compile, and
    in all."""
    counts = dict(zip(unrolling.COUNTS, trials, strict=False))

    def measure(loop, active, count):
        to_compile, cost = counts[count]
        return Trial(to_compile, (cost - to_compile) / 16)

    monkeypatch.setattr(unrolling, "measure", measure)
    monkeypatch.setattr(unrolling, "NOISE", noise)
    monkeypatch.setattr(unrolling, "USES", 1)
    result = unrolling._try_all(sines(16), None, 16)
    return result["unroll"], len(result["seconds"])


def test_when_no_more_are_tried(monkeypatch):
    of = lambda *trials, **how: found(monkeypatch, *trials, **how)
    assert of((6, 10)) == (1, 1), "compiling the next takes longer than all steps"
    assert of((5, 10), (8, 12)) == (1, 2), "not if it takes as long"
    assert of((4, 10), (8, 12)) == (1, 2)
    assert of((0, 100), (0, 160), (0, 90), (0, 160), (0, 160)) == (1, 5), "one alone may be slow"
    assert of((0, 100), (0, 160), (0, 160)) == (1, 3), "two in a row are slower"
    assert of((0, 100), (0, 160), (0, 150), (0, 30), (0, 40)) == (8, 5), "not by more than noise"


def test_which_of_those_tried_is_chosen(monkeypatch):
    of = lambda *trials, **how: found(monkeypatch, *trials, **how)
    assert of((0, 150), (0, 100), (0, 120), (0, 110), (0, 101)) == (1, 5), "within the noise"
    assert of((0, 152), (0, 100), (0, 120), (0, 110), (0, 101)) == (2, 5)
    assert of((0, 150), (0, 100), (0, 120), (0, 103), (0, 101), noise=1.05) == (2, 5)


def test_seconds_are_between_two_times(monkeypatch):
    """Of a clock that is read before and after; the fastest run counts."""
    took = iter([5, *range(2, 2 + unrolling.ROUNDS)])
    clock = itertools.accumulate(x for t in took for x in (100.0, t))
    monkeypatch.setattr(unrolling, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert unrolling.measure(sines(4), None, 2) == Trial(5.0, 0.5)


# ---------------------------------------------------------------- what a GPU is told beforehand


def counted(monkeypatch, loop, launch, wait=0.0, active=None):
    """Where compiling an equation takes half a second, and a loop runs 1e9 / steps times.

    Twice as many steps to an iteration are better if 2 n^2 times the seconds to compile it once are
    less than what an iteration takes beside its steps.
    """
    for name, value in {"COMPILE": 0.5, "LAUNCH": launch, "WAIT": wait, "USES": 10**7}.items():
        monkeypatch.setattr(unrolling, name, value)
    return unrolling._counted(loop, active)


def two_equations(**settings):
    """And two leaves."""
    body = lambda _, carry, x: ([jnp.sin(carry[0]), carry[1] * 2.0], [])
    return make_loop(body, [], [0.5, 0.5], length=100, **settings)[0]


def test_launches_are_counted(monkeypatch):
    """Two equations take a second to compile."""
    of = lambda launch, **how: counted(monkeypatch, two_equations(), launch, **how)
    launches = [1.9, 2.1, 7.9, 8.1, 31, 33, 127, 129]
    assert list(map(of, launches)) == [1, 2, 2, 4, 4, 8, 8, 16]
    active = Active((), (True, True), (), ())
    found = [of(3 * launch, active=active) for launch in launches]
    assert found == [1, 2, 2, 4, 4, 8, 8, 16], "steps are compiled three times"
    assert of(1.9, wait=1e9) == 1, "nothing is asked"


def test_waits_are_counted(monkeypatch):
    """Steps that do not count hold each leaf: of two, a launch more than is saved."""
    two = two_equations(cond=lambda _, carry: carry[0] > 0)
    for launch in (0.0, 1.0, 5.0):
        of = lambda saved, launch=launch: counted(monkeypatch, two, launch, launch + saved)
        assert [of(saved) for saved in (1.9, 2.1, 7.9, 8.1, 31, 33)] == [1, 2, 2, 4, 4, 8]


def test_as_many_as_there_are_steps(monkeypatch):
    for steps, most in ((1, 1), (2, 2), (3, 2), (8, 8)):
        assert counted(monkeypatch, sines(steps), 1e12) == most


def test_what_holds_no_steps_for_a_gpu(monkeypatch):
    """What does something beside computing, behind a predicate; what cannot be tried at all."""
    silent = counted(monkeypatch, halves(length=100), 0.0, 1e9)
    speaks = counted(monkeypatch, halves(said, length=100), 0.0, 1e9)
    without = make_loop(lambda _, carry, x: ([said(carry[0])], []), [], [0.5], length=100)[0]
    assert (silent, speaks, counted(monkeypatch, without, 1e9)) == (16, 1, 16)
    assert counted(monkeypatch, sines(100, buffers=[0]), 1e9) == 1


# ---------------------------------------------------------------- what is known already


@pytest.fixture
def known(monkeypatch, tmp_path):
    """Of a machine with one device on which nothing was tried. The counts that are tried."""
    tried = []

    def measure(loop, active, count):
        tried.append(count)
        return Trial(0.0, 1.0 / count)

    device = SimpleNamespace(platform="cpu", device_kind="a kind")
    monkeypatch.setattr(unrolling, "measure", measure)
    monkeypatch.setattr(unrolling, "_chosen", {})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setenv("LOOPKIT_CACHE_DIR", str(tmp_path))
    return tried


def test_what_is_kept_and_no_count_is_tried_again(known):
    loop = sines(4)
    name = f"unroll-{unrolling._key(loop, None, 4)}"
    for kept in (None, [8], {"unroll": 3}, {}):
        user_cache.store(name, kept)
        assert unrolling._choose(loop, None) == 4
        assert known == [1, 2, 4]
        assert user_cache.load(name)["unroll"] == 4
        known.clear()
        unrolling._chosen.clear()


def test_a_process_asks_once(known):
    loop = sines(4)
    user_cache.store(f"unroll-{unrolling._key(loop, None, 4)}", {"unroll": 2})
    assert unrolling._choose(loop, None) == 2
    user_cache.store(f"unroll-{unrolling._key(loop, None, 4)}", {"unroll": 1})
    assert unrolling._choose(loop, None) == 2
    assert not known


def test_for_a_gpu_nothing_is_tried(known):
    loop = sines(4, auto_unroll=True)
    with _jax.host_waits(True):
        unrolling.settled(loop)
    assert not known
    assert unrolling.settled(loop) == 4
    assert known == [1, 2, 4]


# ---------------------------------------------------------------- what is timed


def test_made_up_values():
    """Products of them stay finite, and are not zero; what counts or decides is zero."""
    of = lambda dtype: unrolling._made_up(_jax.ShapedArray((3,), jnp.dtype(dtype)))
    for dtype in ("float32", "complex128"):
        assert of(dtype).dtype == dtype
        assert ((abs(of(dtype)) > 0) & (abs(of(dtype)) < 1)).all()
    for dtype in ("int32", "bool"):
        assert of(dtype).dtype == dtype
        assert not of(dtype).any()


def two_in_two(**settings):
    """Two consts, leaves and outputs, and a predicate that is false after two steps."""

    def body(consts, carry, x):
        (v, w), (a, b) = consts, carry
        return [a * v + x[0], jnp.sin(b * w)], [a * b]

    cond = lambda limits, carry: carry[0] < limits[0]
    xs = np.linspace(0.5, 1.0, 6)
    return make_loop(body, [1.1, 0.9], [0.1, 0.4], [xs], cond=cond, cond_consts=[1.2], **settings)


def of_steps(loop, operands, active, n):
    """What `n` steps give, whatever the predicate says, or the gradient of it."""

    def value(consts, init, xs):
        carry, rows = init, []
        for k in range(n):
            outs = _jax.call_jaxpr(loop.body)(*consts, *carry, xs[0][k])
            carry, (y,) = parts(outs, loop.carry_count)
            rows.append(y)
        y = jnp.stack([*rows, *[0.0] * (loop.length - n)])
        return [*carry, y]

    given = operands[1:]
    if active is None:
        return value(*given)
    _, pull = jax.vjp(value, *given)
    return jax.tree.leaves(pull([jnp.ones_like(v) for v in value(*given)]))


@pytest.mark.parametrize("active", [None, Active((True,) * 2, (True,) * 2, (True,), (True,))])
def test_a_trial_takes_its_steps(active):
    """So many, and what they compute is returned, so that all of it is computed."""
    loop, operands = two_in_two(auto_unroll=True)
    function, types = unrolling.trial_of(loop, active, 2, 6)
    assert [(t.shape, t.dtype) for t in types] == [
        (np.shape(v), np.asarray(v).dtype) for v in operands.flat
    ]
    function = jax.jit(function)
    for n in (0, 1, 5, 6):
        wanted = of_steps(loop, operands, active, n)
        assert_same(function(jnp.int32(n), *operands.flat), wanted, 1e-12)
    asked = run(loop, operands)
    assert not np.allclose(asked[0], wanted[0]), "the predicate would have had a say"


@pytest.mark.parametrize("length", [None, 40])
def test_a_trial_is_of_a_loop_like_it(length):
    """With a bound if it has one, but that of the trial; settled, so that it is not tried."""
    loop = halves(length=length, auto_unroll=True, checkpoints=3, reverse=False)
    function, types = unrolling.trial_of(loop, None, 4, 33)
    (eqn,) = (e for e in jax.make_jaxpr(function)(0, *types).eqns if e.primitive is while_p)
    trial = eqn.params["loop"]
    assert trial.length == (length and 33)
    assert (trial.unroll, trial.auto_unroll, trial.checkpoints) == (4, False, None)
