"""The machine itself: does it see a loop that is wrong, and does it print what runs?"""

import functools
import re
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call

import loopkit
from trials import in_numpy
from trials.compare import MOVED, IllConditioned, Results, Trial, compare
from trials.drawn import draw_trial
from trials.draws import Type
from trials.hunt import Uniform, failure
from trials.implementations import OWN, Implementation, LaxLoops
from trials.layers import CALLS
from trials.mutants import PACKAGE, mutants
from trials.prelude import PRELUDE
from trials.printed import called_parts, printed
from trials.programs import Program
from trials.relations import Related
from trials.transformations import BUDGETS, LETTERS, vector


class OneStepShort(LaxLoops):
    """Loops that leave out the last step, if they have a counter."""

    def fori_loop(self, lower, upper, body, init, **_):
        return lax.fori_loop(lower, upper - 1, body, init)


class NoTangents(LaxLoops):
    """Right values, and no derivative of what a scan starts from."""

    def scan(self, f, init, xs, length, reverse=False, **_):
        inexact = lambda v: jnp.issubdtype(jnp.asarray(v).dtype, jnp.inexact)
        init = jax.tree.map(lambda v: lax.stop_gradient(v) if inexact(v) else v, init)
        return lax.scan(f, init, xs, length, reverse)


@functools.cache
def drawn() -> list[Trial]:
    return [draw_trial(Uniform(number)) for number in range(500)]


def first_failure(implementation: Implementation, programs: int) -> str:
    trials = (draw_trial(Uniform(number)) for number in range(programs))
    return next(filter(None, (failure(t, implementation) for t in trials)), "")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [OneStepShort, NoTangents])
def test_a_wrong_loop_is_seen(wrong):
    said = first_failure(Implementation("lax", wrong(), OWN), 200)
    assert said.startswith("AssertionError"), said


@pytest.mark.slow
def test_what_is_infinite_is_not_compared():
    """An infinite value is not compared, and raises no warning, which would be an error here."""
    trial = next(t for t in map(draw_trial, map(Uniform, range(200))) if t.program.eps == 2.0**-52)
    of = lambda *leaves: Results([], np.asarray(leaves))
    expected = of(np.inf, 1.0), of(np.nan, MOVED)
    for got in (np.inf, np.nan):
        with pytest.raises(IllConditioned):
            compare(trial, of(got, 1.0), expected)
    with pytest.raises(AssertionError, match=r"derived\[1\] is \(2\+0j\), expected \(1\+0j\)"):
        compare(trial, of(np.inf, 2.0), expected)


@pytest.mark.parametrize(("margin", "rounded"), [(0.0, True), (-0.5, False)])
def test_what_roundings_decide_is_not_compared(margin, rounded):
    """A mean of equal numbers may be a little more, or less, than one of them."""
    body = f"""
def program(a1, n, m, flag, key):
    least = jnp.full((40, 3), a1[0]).mean() + {margin}
    return (loops.while_loop(lambda x: x > least, lambda x: x - 1.0, a1[0], max_steps=9),)
"""
    trial = Trial(Program(body, (Type(shape=(3,)),), frozenset()), "r")
    assert trial.is_decided_by_roundings() == rounded
    value, derived = (np.asarray(v) for v in ([100.0], [9.0] * 3))
    with pytest.raises(IllConditioned if rounded else AssertionError):
        compare(trial, Results(list(value), derived))


@pytest.mark.slow
def test_a_program_is_printed_so_that_it_runs():
    trial = next(
        t for t in map(draw_trial, map(Uniform, range(200))) if t.pattern == "r" and t.lanes == ""
    )
    text, names = printed(trial).rpartition("print(")[0], {}
    exec(text, names)
    got = jax.jit(names["g"])(names["x"], names["others"])
    wanted, _ = trial.expected()
    np.testing.assert_allclose(got, wanted.derived, rtol=1e-10, atol=1e-10)


def test_all_that_a_program_calls_is_printed():
    called = re.findall(r"^(?:def |class )?(\w+)(?= =|\(|:)", PRELUDE, re.MULTILINE)
    assert {"large", "to_many", "helper", "Pair"} <= set(called)
    for name in set(called) - {"_"}:
        names = {"np": np, "jnp": jnp, "jax": jax, "lax": lax, "ft": functools, "eqx": equinox}
        names |= {"Any": Any, "NamedTuple": NamedTuple, "loopkit": loopkit}
        exec(called_parts(f"{name}(x)"), names)
        assert name in names


def test_the_reference_is_what_jax_computes():
    """Its operations are NumPy's: they agree with the compiled program."""
    trials = map(draw_trial, map(Uniform, range(300)))
    trial = next(t for t in trials if t.pattern == "f" and t.program.eps == 2.0**-52)
    f = trial.program.of_vector(trial.program.function({"loops": loopkit}))
    x, others = trial.arguments()
    closed = jax.make_jaxpr(lambda x: vector(f(x, others)))(x)
    alone = in_numpy.evaluate(closed, x)[0]
    np.testing.assert_allclose(alone, jax.jit(lambda x: vector(f(x, others)))(x), rtol=1e-12)


@pytest.mark.slow
def test_every_letter_is_drawn():
    assert {letter for trial in drawn() for letter in trial.pattern} == set(LETTERS)


def test_what_is_looked_for_in_loops_is_drawn():
    """Each kind by itself, and both."""
    bodies = "".join(trial.program.body for trial in drawn())
    for kinds in ("'bounds'", "'finite'", "('bounds', 'finite')"):
        assert f"debug={kinds}" in bodies


def test_layers_without_a_loop_meet_each_budget():
    layers = [trial for trial in drawn() if "for k in range(" in trial.program.body]
    assert {letter for trial in layers for letter in trial.pattern} >= set(BUDGETS)
    bodies = re.sub(r"network\d+", "network", "".join(trial.program.body for trial in layers))
    assert all(call.format("network") in bodies for call in CALLS)


def test_each_mistake_made_on_purpose_has_one_place():
    for mutant in mutants():
        assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1, mutant.name


@pytest.mark.slow
def test_a_relation_that_does_not_hold_is_seen():
    """A transpose that is not the transpose."""
    doubled = lambda v: linear_call(lambda _, x: x, lambda _, ct: 2 * ct, (), v)
    inexact = lambda v: jnp.issubdtype(v.dtype, jnp.inexact)
    double = lambda tree: jax.tree.map(lambda v: doubled(v) if inexact(v) else v, tree)
    wrap = lambda program: lambda *args: double(program(*args))
    right, wrong = (Implementation("lax", LaxLoops(), OWN, w) for w in (lambda p: p, wrap))
    trials = map(draw_trial, map(Uniform, range(300)))
    able = [t for t in trials if t.pattern[:1] == "f" and not right.cannot(t.program, "rf", "jit")]
    related = Related(able[0].program, "adjoint")
    assert related.holds(right)
    assert not related.holds(wrong)
