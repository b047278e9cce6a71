"""Which loops are those of equinox, whose lanes may stop by themselves, and what lanes share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from loopkit import _jax
from loopkit._engine.lanes.going_together import TOGETHER, asking_each, shared_results
from loopkit._jaxprs import equations

from .small_loops import make_loop

in_any_lane, select = Primitive(TOGETHER), Primitive("select_if_vmap")
in_any_lane.def_abstract_eval(lambda x: x)
select.def_abstract_eval(lambda go, new, old: new)

below = lambda _, carry: carry[1] < 9
together = lambda consts, carry: in_any_lane.bind(below(consts, carry))


def doubling(cond=together, held=True, flag=lambda go, k: go & (k < 9)):
    """Count to 9 and double a number, in a carry of a flag, the count and the number."""

    def step(consts, carry, x):
        go, k, v = carry
        if held:
            return [flag(go, k + 1), select.bind(go, k + 1, k), select.bind(go, 2 * v, v)], []
        return [flag(go, k + 1), jnp.where(go, k + 1, k), jnp.where(go, 2 * v, v)], []

    return make_loop(step, [], [True, 0, 0.5], cond=cond, cond_consts=[])[0]


called = lambda consts, carry: jax.jit(in_any_lane.bind)(below(consts, carry))


@pytest.mark.parametrize("cond", [together, called])
def test_each_lane_is_asked(cond):
    found = asking_each(doubling(cond))
    assert [e.primitive.name for e in equations.all_equations(found.cond)] == ["lt"]
    asks = _jax.call_jaxpr(found.cond)
    values = lambda k: (np.asarray(True), np.asarray(k), np.asarray(0.5))
    assert [bool(asks(*values(k))[0]) for k in (8, 9)] == [True, False]


def test_other_loops_stay():
    """Their lanes do not go on together, or steps may change a lane that has stopped."""
    assert asking_each(doubling(cond=None)) is None
    assert asking_each(doubling(cond=below)) is None
    assert asking_each(doubling(held=False)) is None
    assert asking_each(doubling(flag=lambda go, k: k < 9)) is None


def test_what_lanes_share():
    def step(consts, carry, x):
        up, down, same, product = carry
        return [up + 2, down - 3, same, 2 * product], []

    loop = make_loop(step, [], [0, 0, 0.5, 1], cond=lambda _, c: c[0] < 9, cond_consts=[])[0]
    assert shared_results(loop, [None, None, None, 0]) == ((0, 2), (1, -3), (2, 0))
    assert shared_results(loop, [0, 0, 0, 0]) == ()
    assert shared_results(loop, [0, 0, 0, None]) is None
