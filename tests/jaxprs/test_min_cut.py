"""The least to store of a step: against every set of variables from which its residuals follow."""

import itertools
import random
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._jaxprs import min_cut
from tolerances import SAME_OPERATIONS

from .hull import lower_hull

SCALAR, VECTOR = (_jax.ShapedArray(shape, jnp.dtype("float64")) for shape in ((), (3,)))


@dataclass(eq=False)
class Variable:
    aval: _jax.ShapedArray
    operands: list | None = None
    """The variables that it is computed from again; None if it is not."""
    given: bool = False
    free: bool = False


@dataclass
class Known:
    """Facts about the variables of a jaxpr."""

    variables: dict = field(default_factory=dict)
    constants: set = field(default_factory=set)
    """Variables that depend on constants alone."""


def follow(target, known):
    if target in known or target.given:
        return True
    return target.operands is not None and all(follow(v, known) for v in target.operands)


def cost(chosen):
    return sum(0 if v.free else min_cut.EACH + _jax.byte_count(v.aval) for v in chosen)


def every_way(variables, targets):
    """All sets of variables from which the targets follow."""
    some = [v for v in variables if not v.given]
    for flags in itertools.product([False, True], repeat=len(some)):
        chosen = {v for v, f in zip(some, flags, strict=True) if f}
        if all(follow(v, chosen) for v in targets):
            yield chosen


CONSTANTS, CARRY, XS = [SCALAR], [VECTOR, SCALAR], [VECTOR]
TYPES = [*CONSTANTS, *CARRY, *XS]


def random_step(rng):
    """(constants, carry, x) -> a result, residuals; and which variable each value is."""
    program = []
    count = len(TYPES)
    for _ in range(rng.randint(2, 5)):
        name = rng.choice(["add", "mul", "sin", "sum", "tripled"])
        program.append((name, rng.randrange(count), rng.randrange(count)))
        count += 1
    residuals = rng.choices(range(count), k=rng.randint(1, 4))

    def run(*values):
        values = list(values)
        for name, i, j in program:
            a, b = values[i], values[j]
            if name == "sum":
                values.append(a.sum())
            elif name == "tripled":
                values.append(a if a.ndim else jnp.broadcast_to(a, (3,)))
            else:
                values.append({"add": a + b, "mul": a * b, "sin": jnp.sin(a)}[name])
        return [values[-1], *(values[i] for i in residuals), 2.0]

    return _jax.trace_closed(run, TYPES, "step")


def described(jaxpr, free, all_again=False):
    """The variables of a jaxpr of `random_step`, as the brute force sees them.

    `all_again`: whether every equation may run again, and not just a cheap one.
    """
    found = Known()
    for i, v in enumerate(jaxpr.invars):
        is_constant = i < len(CONSTANTS)
        is_slice = i >= len(CONSTANTS) + len(CARRY)
        leaf = i - len(CONSTANTS)
        costless = not is_constant and not is_slice and free[leaf]
        found.variables[v] = Variable(v.aval, None, is_constant or is_slice, costless)
        if is_constant:
            found.constants.add(v)
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
        (out,) = eqn.outvars
        again = all_again or eqn.primitive.name not in ("sin", "reduce_sum")
        once = all(v in found.constants for v in operands)
        ins = [found.variables[v] for v in operands] if again else None
        found.variables[out] = Variable(out.aval, ins, given=once)
        if once:
            found.constants.add(out)
    return found


def values_of(jaxpr, inputs):
    """All values of a jaxpr of `random_step`, with numpy."""
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda v: v.val if isinstance(v, _jax.Literal) else values[v]
    for eqn in jaxpr.eqns:
        ins = list(map(read, eqn.invars))
        match eqn.primitive.name:
            case "add":
                value = ins[0] + ins[1]
            case "mul":
                value = ins[0] * ins[1]
            case "sin":
                value = np.sin(ins[0])
            case "reduce_sum":
                value = np.sum(ins[0])
            case "broadcast_in_dim":
                value = np.broadcast_to(ins[0], eqn.params["shape"])
        values[eqn.outvars[0]] = value
    return values, list(map(read, jaxpr.outvars))


INPUTS = [np.float64(0.7), np.array([0.3, -0.4, 1.2]), np.float64(1.1), np.array([2.0, 0.5, -0.1])]


@pytest.mark.exhaustive
def test_random_steps():
    rng = random.Random(5)
    for _ in range(40):
        step, free = random_step(rng), [rng.random() < 0.3 for _ in CARRY]
        jaxpr = _jax.open_jaxpr(step)
        residuals = min_cut.Residuals(step, 1, len(CONSTANTS), len(TYPES) - len(XS), free)
        cut = residuals.cut(residuals.least)
        known = described(jaxpr, free)
        targets = [v for v in jaxpr.outvars[1:] if not isinstance(v, _jax.Literal)]
        stored = {known.variables[v] for v in cut.stored}
        wanted = [known.variables[v] for v in targets]
        assert cost(stored) == min(map(cost, every_way(known.variables.values(), wanted)))
        assert known.constants.issuperset(cut.hoisted)
        as_they_are = {v for v in targets if not known.variables[v].given}
        assert cut.uncut == sum(_jax.byte_count(v.aval) for v in as_they_are)

        values, outs = values_of(jaxpr, INPUTS)
        ready = [*jaxpr.invars[: len(CONSTANTS)], *jaxpr.invars[len(TYPES) - len(XS) :]]
        found = cut.remake({v: values[v] for v in (*ready, *cut.hoisted, *cut.stored)})
        for got, expected in zip(found, outs[1:], strict=True):
            np.testing.assert_allclose(got, expected, rtol=SAME_OPERATIONS)


def made_again(targets, chosen):
    """The variables computed on the way from the chosen ones to the targets."""
    found, pending = set(), list(targets)
    while pending:
        v = pending.pop()
        if v not in found and v not in chosen and not v.given:
            found.add(v)
            pending += v.operands
    return found


def check_choices(residuals, time, known):
    """Check that all choices have the times that they say, in order, at prices of their own."""
    choices, prices = residuals.choices, [point.price for point in residuals.choices]
    assert prices == sorted(set(prices))
    assert [residuals.at(p) for p in prices] == choices
    assert [p for p in choices if p in residuals.frontier] == residuals.frontier
    costs = []
    for point in choices:
        stored = {known.variables[v] for v in point.stored}
        assert round(point.nanoseconds * min_cut.PICOSECONDS) == time(stored)
        costs.append((time(stored), -cost(stored)))
    assert costs == sorted(set(costs))


@pytest.mark.slow
def test_the_frontiers_of_random_steps():
    rng, lengths = random.Random(7), set()
    for _ in range(60):
        step, free = random_step(rng), [rng.random() < 0.3 for _ in CARRY]
        jaxpr = _jax.open_jaxpr(step)
        residuals = min_cut.Residuals(step, 1, len(CONSTANTS), len(TYPES) - len(XS), free)
        known = described(jaxpr, free, all_again=True)
        makers = {known.variables[v]: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        wanted = [known.variables[v] for v in jaxpr.outvars[1:] if not isinstance(v, _jax.Literal)]

        def time(chosen, wanted=wanted, makers=makers, residuals=residuals):
            return sum(residuals.times[id(makers[v])] for v in made_again(wanted, chosen))

        ways = every_way(known.variables.values(), wanted)
        expected = lower_hull(sorted((time(way), cost(way)) for way in ways))
        found = []
        for point in residuals.frontier:
            stored = {known.variables[v] for v in point.stored}
            assert round(point.nanoseconds * min_cut.PICOSECONDS) == time(stored)
            found.append((time(stored), cost(stored)))
        assert found == expected
        prices = [point.price for point in residuals.frontier]
        assert prices == sorted(set(prices))
        assert [residuals.at(p) for p in prices] == residuals.frontier
        check_choices(residuals, time, known)
        lengths.add(len(found))

        values, outs = values_of(jaxpr, INPUTS)
        ready = [*jaxpr.invars[: len(CONSTANTS)], *jaxpr.invars[len(TYPES) - len(XS) :]]
        cut = residuals.cut(residuals.frontier[-1])
        again = cut.remake({v: values[v] for v in (*ready, *cut.hoisted, *cut.stored)})
        for got, correct in zip(again, outs[1:], strict=True):
            np.testing.assert_allclose(got, correct, rtol=SAME_OPERATIONS)
    assert lengths >= {1, 2, 3}


@pytest.mark.slow
def test_where_only_some_variables_may_be_stored():
    rng, fewer = random.Random(8), 0
    for _ in range(60):
        step = random_step(rng)
        jaxpr = _jax.open_jaxpr(step)
        made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
        only = {v for v in made if rng.random() < 0.5}
        where = len(CONSTANTS), len(TYPES) - len(XS), [False] * len(CARRY)
        residuals = min_cut.Residuals(step, 1, *where, only=only)
        known = described(jaxpr, where[2], all_again=True)
        makers = {known.variables[v]: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        wanted = [known.variables[v] for v in jaxpr.outvars[1:] if not isinstance(v, _jax.Literal)]
        others = {known.variables[v] for v in made if v not in only}
        ways = list(every_way(known.variables.values(), wanted))
        time = lambda way, w=wanted, m=makers, r=residuals: sum(
            r.times[id(m[v])] for v in made_again(w, way)
        )
        hull = lambda ways, time=time: lower_hull(sorted((time(way), cost(way)) for way in ways))
        stored = [{known.variables[v] for v in point.stored} for point in residuals.frontier]
        assert [(time(s), cost(s)) for s in stored] == hull(w for w in ways if w.isdisjoint(others))
        fewer += hull(ways) != hull(w for w in ways if w.isdisjoint(others))
    assert fewer > 5


def kept_of(fun, types, constants=0, carry=1):
    """Return what is hoisted and what is stored of a step whose residuals are all that `fun`
    returns."""
    step = _jax.trace_closed(fun, types, "step")
    residuals = min_cut.Residuals(step, 0, constants, constants + carry, [False] * carry)
    cut = residuals.cut(residuals.least)
    makers = {v: eqn.primitive.name for eqn in _jax.open_jaxpr(step).eqns for v in eqn.outvars}
    name = lambda v: makers.get(v, "input")
    return list(map(name, cut.hoisted)), list(map(name, cut.stored))


def of_tanh(h):
    y = jnp.tanh(h)
    return [y, 1 - y**2]


def of_one_row(h):
    """Three numbers to store rather than nine that are made of them."""
    return [h[:, None] + jnp.ones((3, 3)), h[:, None] * 2.0 + jnp.zeros((3, 3))]


def of_expensive_equations(h):
    y = jnp.exp(h)
    return [y, jnp.sin(y)]


@pytest.mark.parametrize(
    ("fun", "stored"),
    [(of_tanh, ["tanh"]), (of_one_row, ["input"]), (of_expensive_equations, ["exp", "sin"])],
)
def test_what_is_stored_of_a_step(fun, stored):
    assert kept_of(fun, [VECTOR]) == ([], stored)


def test_what_constants_make_is_computed_once():
    def fun(w, h):
        s = jnp.sin(w)
        return [s * h, s, h]

    assert kept_of(fun, [SCALAR, VECTOR], constants=1) == (["sin"], ["input"])


def test_of_very_long_steps_the_residuals_are_stored(monkeypatch):
    def fun(x):
        return [x * 2.0, x * 3.0, x]

    assert kept_of(fun, [VECTOR]) == ([], ["input"])
    monkeypatch.setattr(min_cut, "LARGEST_GRAPH", 1)
    assert kept_of(fun, [VECTOR]) == ([], ["mul", "mul", "input"])


def test_between_points_that_are_far_apart_there_are_more_choices():
    types = [_jax.ShapedArray((40, 40), jnp.dtype("float64"))] * 2
    three_times = lambda x: jnp.exp(jnp.exp(jnp.exp(x)))
    step = _jax.trace_closed(lambda w, h: [h, jnp.exp(h), three_times(h[:10])], types, "step")
    residuals = min_cut.Residuals(step, 1, 1, 2, [True])
    large, small = step.jaxpr.outvars[1:]
    kept = [set(point.stored) - set(step.jaxpr.invars) for point in residuals.choices]
    assert kept == [{large, small}, {large}, {small}, set()]
    both, beside, fewer, none = residuals.choices
    assert residuals.frontier == [both, fewer, none]
    assert both.nanoseconds < beside.nanoseconds < fewer.nanoseconds < none.nanoseconds
    assert both.price < beside.price < fewer.price


def test_between_such_points_the_carry_may_be_stored_instead():
    typed = lambda *shape: _jax.ShapedArray(shape, jnp.dtype("float64"))

    def fun(wide, back, up, h):
        centred = h - jnp.mean(h, 1, keepdims=True)
        first = centred @ wide @ back @ wide
        then = h + first @ back
        again = then - jnp.mean(then, 1, keepdims=True)
        return [h, centred, first, again, again @ up]

    types = [typed(40, 120), typed(120, 40), typed(40, 160), typed(40, 40)]
    step = _jax.trace_closed(fun, types, "step")
    residuals = min_cut.Residuals(step, 1, 3, 4, [False])
    carry, (_, first, _, second) = step.jaxpr.invars[3], step.jaxpr.outvars[1:]
    fastest, beside, *_ = residuals.choices
    assert set(fastest.stored) == set(step.jaxpr.outvars[1:])
    assert set(beside.stored) == {carry, first, second}
    assert beside not in residuals.frontier
