"""How a loop is reversed: what is saved of its carry, and which products are put off."""

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import Plan
from loopkit._engine.derivative import deferred_products
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import Operands

from .small_loops import make_loop

SIZE = 6


def reversed_loop(body, *operands, moving, **settings):
    loop, _ = make_loop(body, *operands, **settings)
    return reversal(loop, forward_activity(loop, moving))


@pytest.mark.parametrize(("slope", "saved"), [(jnp.sign, True), (lambda b: 2.0, False)])
def test_carries_that_only_ys_read_are_not_saved(slope, saved):
    """Unless their derivatives read them, too."""

    def body(consts, carry, x):
        a, b = carry
        return [jnp.sin(a), b * 0.9], [slope(b) * b]

    moving = Operands([], [], [True, True], [])
    how = reversed_loop(body, [], [0.3, 0.5], length=6, checkpoints=Plan(2), moving=moving)
    assert how.saved == (True, saved)


def products(segment, store):
    """Of a step with one large enough."""
    numbers = lambda *shape: np.sin(np.arange(np.prod(shape))).reshape(shape)

    def dense(consts, carry, x):
        return [jnp.tanh(consts[0] @ carry[0] + x[0])], []

    operands = [numbers(SIZE, SIZE)], [numbers(SIZE)], [numbers(12, SIZE)]
    moving, plan = Operands([], [True], [True], [False]), Plan(3, segment, store)
    return reversed_loop(dense, *operands, checkpoints=plan, moving=moving).products


@pytest.mark.parametrize("store", ["carries", "residuals"])
def test_products_are_put_off_over_several_steps(store, monkeypatch):
    """Of one step, it would be kept for nothing. A factor that is a row is not kept twice."""
    monkeypatch.setattr(deferred_products, "SMALLEST", 64)
    assert products(1, store) is None
    found = products(2, store)
    assert found.put_off == (True, False)
    assert (len(found.factors), len(found.rows)) == (1, 1)
