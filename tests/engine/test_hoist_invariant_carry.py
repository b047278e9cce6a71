"""Carry leaves that every step passes on are constants."""

import jax.numpy as jnp
import numpy as np

from loopkit._engine.loop import CarryLeaf, Const
from loopkit._engine.passes.hoist_invariant_carry import hoist_invariant_carry

from .small_loops import assert_same, make_loop, run


def body(consts, carry, x):
    """The second and the last leaf stay; the first is another that moves."""
    a, scale, b, c, n = carry
    new = jnp.sin(a * scale + consts[0]) + x[0] * n
    return [b, scale, new, c, n], [new * consts[1], n + c]


def small(**how):
    init, xs = [0.3, 0.9, 0.2, 2, 1.5], [np.sin(np.arange(5.0)), np.arange(5.0)]
    return make_loop(body, [0.1, 0.7], init, xs, **how)


def of_the_same_results(loop, operands):
    new = hoist_invariant_carry(loop)
    given = new.loop.split(new.map_operands(operands.flat))[0]
    assert_same(new.map_results(run(new.loop, given), operands.flat), run(loop, operands))
    return new, given


def test_with_a_bound_alone():
    new, given = of_the_same_results(*small())
    assert (new.loop.cond, given.cond_consts) == (None, [])
    assert new.loop.consts == (Const(),) * 5
    assert [leaf.name for leaf in new.loop.carry] == ["carry 0", "carry 2"]
    assert_same(given.consts, [0.1, 0.7, 0.9, 2, 1.5])
    assert_same(given.init, [0.3, 0.2])


def test_a_predicate_asks_for_them():
    asks = lambda limit, carry: (carry[0] * carry[1] < limit[0]) & (carry[3] < limit[1])
    loop, operands = small(cond=asks, cond_consts=[0.5, 3])
    _, given = of_the_same_results(loop, operands)
    assert_same(given.cond_consts, [0.5, 3, 0.9, 2, 1.5])
    assert 0 < np.count_nonzero(run(loop, operands)[5]) < 5, "it ends before the last row"


def test_a_flag_stays():
    loop, _ = small()
    flagged = list(loop.carry)
    flagged[3] = CarryLeaf(flag=True)
    new = hoist_invariant_carry(loop.replace(carry=tuple(flagged)))
    assert [leaf.flag for leaf in new.loop.carry] == [False, False, True]
    assert len(new.loop.consts) == 4


def test_what_only_moves_is_as_it_was():
    moving = lambda consts, carry, x: [[carry[1], carry[0], carry[2] + 1], [carry[0]]]
    loop, _ = make_loop(moving, [], [0.1, 0.2, 0], [np.arange(3.0)])
    assert hoist_invariant_carry(loop) is loop


def test_all_stay():
    step = lambda consts, carry, x: (carry, [x[0] + carry[1]])
    loop, operands = make_loop(step, [], [1, 2.0], [np.arange(4.0)])
    new, _ = of_the_same_results(loop, operands)
    assert new.loop.carry == ()
    assert hoist_invariant_carry(new.loop) is new.loop
