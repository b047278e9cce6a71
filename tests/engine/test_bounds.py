"""Bounds of the number of steps, from predicates: see also `test_bounds.py` of the public loops."""

import itertools
import operator

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit._engine.facts.bounds import PLANNED, Limit, Limits, StepBound, bound_of, limits_of
from loopkit._jaxprs.integers import Range

from .small_loops import make_loop
from .test_write_log import inner

TESTS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
ENDS = -128, -127, -126, -3, 0, 2, 125, 126, 127
"""Numbers of a byte."""


def counted(first, by, holds):
    """Count the steps, with exact integers; None if a value does not fit in a byte."""
    steps = 0
    while holds(first):
        first, steps = first + by, steps + 1
    return steps if -128 <= first <= 127 else None


def test_steps_of_a_limit():
    """Against a loop in Python; a counter that wraps around is no limit."""
    for (name, holds), first, limit, size in itertools.product(
        TESTS.items(), ENDS, ENDS, (1, 2, 3, 50)
    ):
        by = size if name in ("lt", "le") else -size
        found = Limit(0, by, int(name in ("le", "ge")), limit, -1, np.int8)
        wanted = counted(first, by, lambda i, holds=holds, limit=limit: holds(i, limit))
        assert found.steps([Range(first, first)]) == wanted, (name, first, limit, by)


def test_steps_of_a_limit_in_ranges():
    """No start and no limit of a range makes for more."""
    for (name, holds), low, last, size in itertools.product(
        TESTS.items(), ENDS, ENDS, (1, 2, 3, 50)
    ):
        by = size if name in ("lt", "le") else -size
        found = Limit(0, by, int(name in ("le", "ge")), None, 1, np.int8)
        firsts, limits = ([n for n in range(end, end + 3) if n < 128] for end in (low, last))
        ranges = [Range(min(firsts), max(firsts)), Range(min(limits), max(limits))]
        most = found.steps(ranges)
        each = [
            counted(first, by, lambda i, holds=holds, limit=limit: holds(i, limit))
            for first in firsts
            for limit in limits
        ]
        assert most is None or (None not in each and max(each) == most), (name, ranges, by, each)
        if most is not None:
            low, high = found.inside(ranges)
            taken = [i for i in firsts for limit in limits if holds(i, limit)]
            assert all(low <= i <= high for i in taken)


def limits(test, step, init, consts=(), **how):
    """test(limits, carry), step(consts, carry); 10 is an operand of the predicate."""
    body = lambda consts, carry, x: (step(consts, carry), [])
    loop, given = make_loop(body, consts, init, cond=test, cond_consts=[10], **how)
    found = limits_of(loop.cond, loop.cond_const_count, loop.body, loop.const_count)
    return found, [*given.cond_consts, *given.init]


def bound(*args):
    return bound_of(*limits(*args))


def test_a_limit_that_is_the_first_operand():
    assert bound(lambda n, c: c[0] < n[0], lambda _, c: [c[0] + 1], [4]) == StepBound(6, True)


def test_no_step_is_taken_beyond():
    for first, steps in [(9, 1), (10, 0), (14, 0)]:
        found = bound(lambda n, c: c[0] < n[0], lambda _, c: [c[0] + 1], [first])
        assert found == StepBound(steps, True)


def test_limits_that_may_be_reached_and_several():
    def steps(test, by, first):
        return bound(lambda _, c: test(c[0]), lambda _, c: [c[0] + by], [first]).steps

    assert steps(lambda c: c <= 7, 1, 0) == 8
    assert steps(lambda c: jnp.asarray(7) >= c, 1, 0) == 8
    assert steps(lambda c: c >= 3, -1, 7) == 5
    assert steps(lambda c: jnp.asarray(3) <= c, -2, 7) == 3
    assert steps(lambda c: (c < 9) & (c < 7), 1, 0) == 7
    assert steps(lambda c: ~((c >= 7) | (c >= 9)), 1, 0) == 7


def test_what_else_is_asked():
    """A leaf of the carry itself, and what compares nothing."""
    step = lambda _, c: [c[0] + 1, c[0] < 5]
    assert bound(lambda n, c: c[1], step, [0, True]) is None
    assert bound(lambda n, c: ~c[1], step, [0, True]) is None
    assert bound(lambda n, c: c[1] & (c[0] < n[0]), step, [0, True]) == StepBound(10, False)
    several = lambda n, c: jnp.isfinite(c[1]) & (c[0] < n[0])
    assert bound(several, lambda _, c: [c[0] + 1, c[1] * 2], [0, 0.5]) == StepBound(10, False)


def below_ten(step, init, consts=()):
    """The limits of a counter that is the last leaf."""
    return limits(lambda n, c: c[-1] < n[0], step, init, consts)


def scanned(consts, carry):
    """Ten steps in each, by a constant and another leaf."""
    step = lambda c, _: ((c[0] * consts[0], c[1] + 2), None)
    return list(lax.scan(step, tuple(carry), None, 10)[0])


def looped(consts, carry):
    each = lambda consts, carry, x: ([carry[0] * consts[0], carry[1] + 2], [])
    return inner(consts, carry, each, length=10)


def test_counters_of_inner_loops():
    for step in (scanned, looped):
        found, operands = below_ten(step, [jnp.asarray(0.5), 0], [jnp.asarray(0.9)])
        assert [limit.by for limit in found.found] == [20]
        assert bound_of(found, operands) == StepBound(1, True)
        assert bound_of(found, [*operands[:-1], np.asarray(-50)]) == StepBound(3, True)


def test_what_inner_loops_make_of_something_else():
    count = lambda i, _: (i + 1, None)
    found, _ = below_ten(lambda _, c: [lax.scan(count, c[0] * 2, None, 3)[0]], [1])
    assert found.found == ()
    ends = lambda _, c: inner([], c, lambda _, c, x: ([c[0] + 1], []), **UNTIL_FIVE)
    found, _ = below_ten(ends, [jnp.asarray(1)])
    assert found.found == ()


UNTIL_FIVE = {"cond": lambda _, carry: carry[0] < 5}


def test_what_inner_loops_stack():
    """Rows that are read or stacked are no counters; there may be lanes of them."""
    step = lambda _, c: [lax.scan(lambda s, i: (s + i, i + 1), 0, c[0])[1]]
    loop, _ = make_loop(
        lambda consts, carry, x: (step(consts, carry), []),
        [],
        [np.arange(3)],
        cond=lambda n, c: c[0] < n[0],
        cond_consts=[10],
    )
    assert limits_of(loop.cond, 1, loop.body, 0).found == ()


def test_inner_loops_of_unknown_length():
    """Programs that are exported for any size have inner loops of unknown length."""
    (n,) = jax.export.symbolic_shape("n")
    number, rows = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(), (n,)])
    step = lambda rows, i: lax.scan(lambda i, _: (i + 1, None), i, rows)[0]
    body, cond = jax.make_jaxpr(step)(rows, number), jax.make_jaxpr(lambda i: i < 10)(number)
    assert limits_of(cond, 0, body, 1) == Limits((), True)


def test_what_is_planned_for():
    """A bound that is not reached, if it is not far; all steps, if they are kept or known."""
    assert StepBound(PLANNED, False).is_planned_for(3)
    assert not StepBound(PLANNED + 1, False).is_planned_for(3)
    assert StepBound(PLANNED + 1, True).is_planned_for(3)
    assert StepBound(PLANNED + 1, False).is_planned_for("all")
