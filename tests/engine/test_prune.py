"""A loop without what nobody uses: what is left gives the same, and no more is left."""

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit._engine.lanes.many_lanes import OneLane
from loopkit._engine.loop import Operands, kept
from loopkit._engine.passes.unused import prune

from .small_loops import assert_same, make_loop, run

CONSTS = [0.9, 0.4, 0.7]
INIT = [0.3, 0, 0.2, 0.5]
XS = [np.sin(np.arange(6.0)), np.cos(np.arange(6.0)), np.ones(6)]


def body(consts, carry, x):
    """b counts; a needs nothing else, c needs a, and d what nothing else does."""
    (u, v, w), (a, b, c, d) = consts, carry
    new = [jnp.sin(a * u) + x[0], b + 1, c * v + a, d * w + x[2]]
    return new, [c * 2.0, b * 1.0, x[1] + x[2]]


def small(bounded=True):
    if bounded:
        return make_loop(body, CONSTS, INIT, XS)
    asks = lambda consts, carry: (carry[1] < consts[1]) & (consts[0] > 0)
    return make_loop(body, CONSTS, INIT, XS, cond=asks, cond_consts=[1.0, 4])


def flags(text):
    return [c != "." for c in text]


NEEDED = [
    # results: carry, ys     consts  carry   xs
    ("a... ...", True, ("u..", "a...", "0..")),
    ("a... ...", False, ("u..", "ab..", "0..")),
    ("..c. ...", True, ("uv.", "a.c.", "0..")),
    (".... 0..", True, ("uv.", "a.c.", "0..")),
    (".... .1.", True, ("...", ".b..", "...")),
    (".... ..2", True, ("...", "....", ".12")),
    ("...d ..2", False, ("..w", ".b.d", ".12")),
    ("abcd 012", False, ("uvw", "abcd", "012")),
]


@pytest.mark.exhaustive
def test_what_is_left():
    for results, bounded, wanted in NEEDED:
        loop, operands = small(bounded)
        used, left = flags(results.replace(" ", "")), Operands([], *map(flags, wanted))
        pruned = prune(loop, used)
        asked = [] if bounded else [True, True]
        assert pruned.operands == [*asked, *left.flat]
        assert pruned.results == [*left.init, *used[4:]]
        given = pruned.loop.split(pruned.map_operands(operands.flat))[0]
        assert len(given.cond_consts) == len(asked)
        results = pruned.map_results(run(pruned.loop, given))
        assert [v is not None for v in results] == pruned.results
        assert_same(kept(results, used), kept(run(loop, operands), used))


def test_a_constant_that_the_predicate_does_not_ask_for():
    asks = lambda consts, carry: carry[1] < consts[1]
    loop, operands = make_loop(body, CONSTS, INIT, XS, cond=asks, cond_consts=[0.5, 3])
    pruned = prune(loop, flags(".b....."))
    assert pruned.operands == [False, True, *flags("....b..")[:3], *flags(".b.."), *flags("...")]
    given = pruned.loop.split(pruned.map_operands(operands.flat))[0]
    assert_same(pruned.map_results(run(pruned.loop, given))[1:2], [3])


def test_what_is_needed_besides():
    """Inputs of a step: what residuals are made of."""
    loop, operands = small()
    used = flags("a......")
    for more, carry in [(".v. .... .1.", "a..."), ("... ...d ..2", "a..d")]:
        pruned = prune(loop, used, flags(more.replace(" ", "")))
        a, b = flags("u..a...0.."), flags(more.replace(" ", ""))
        either = [x or y for x, y in zip(a, b, strict=True)]
        also = flags("..w.......") if carry == "a..d" else [False] * 10
        assert pruned.operands == [x or y for x, y in zip(either, also, strict=True)]
        assert pruned.results == [*flags(carry), *flags("...")]
        given = pruned.loop.split(pruned.map_operands(operands.flat))[0]
        assert_same(pruned.map_results(run(pruned.loop, given))[:1], run(loop, operands)[:1])


def test_it_is_made_once():
    loop, _ = small()
    used = flags("a......")
    assert prune(loop, used) is prune(loop, list(used))
    assert prune(loop, used) is not prune(loop, used, flags(".v........"))


@pytest.mark.slow
def test_lanes_stay_lanes_of_what_is_left():
    asks = lambda limit, carry: carry[1] < limit[0]
    loop, operands = make_loop(body, CONSTS, INIT, XS, cond=asks, cond_consts=[4])
    flagged = Operands([True], [False, True, False], [False] * 4, [True, False, False])
    pruned = prune(OneLane(loop, 2, flagged).many, flags("..c...."))
    lane = pruned.loop.lane
    assert (lane.loop.carry_count, lane.count) == (3, 2)
    assert lane.flags == Operands([True], [False, True], [False] * 3, [True])
    limits, v, x = np.array([2, 5]), np.array([0.4, 0.8]), np.stack([XS[0], XS[1]], 1)
    init = [np.stack([value] * 2) for value in operands.init]
    wide = Operands([limits], [CONSTS[0], v, CONSTS[2]], init, [x, *XS[1:]])
    found = run(pruned.loop, pruned.loop.split(pruned.map_operands(wide.flat))[0])
    for i in range(2):
        own = [CONSTS[0], v[i], CONSTS[2]], operands.init, [x[:, i], *XS[1:]]
        wanted = run(loop, Operands([limits[i]], *own))[2:3]
        assert_same([v[i] for v in kept(pruned.map_results(found)[:3], flags("..c"))], wanted)
