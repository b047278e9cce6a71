"""Activity: the leaves with tangents and cotangents, against the Jacobian of the unrolled loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopkit import _jax
from loopkit._engine.facts import activity
from loopkit._engine.loop import Active, Operands, parts

from .small_loops import make_loop

STEPS = 4
"""More than there are carry leaves: what flows anywhere has got there."""


@jax.custom_jvp
def frozen(x):
    return x * 1.0


@frozen.defjvp
def frozen_jvp(primals, tangents):
    return frozen(*primals), lax.stop_gradient(tangents[0])


@jax.custom_jvp
def second_only(x, y):
    return x * y


@second_only.defjvp
def second_only_jvp(primals, tangents):
    return second_only(*primals), primals[0] * tangents[1]


def chain(consts, carry, x):
    """Each leaf feeds the next; the last feeds nothing."""
    a, b, c = carry
    return [a * 1.1, jnp.sin(a) * b, b + x[0] * c], [c * consts[0]]


def ring(consts, carry, x):
    a, b, c = carry
    return [b, c, jnp.sin(a)], [a + consts[0], x[0] * 2.0]


def two_islands(consts, carry, x):
    a, b, c = carry
    return [jnp.sin(a * consts[0]), jnp.cos(b) * x[0], c * 1.5], [a * 2.0, b * 2.0]


def compared(consts, carry, x):
    """A tolerance, and a leaf that only decides."""
    a, b, c = carry
    a = jnp.where(b < consts[0], a * 1.1, a * 0.9 + x[0])
    return [a, b + 0.2, c + (a > c).astype(c.dtype)], [c * 1.0, jnp.floor(a)]


def stopped(consts, carry, x):
    a, b, c = carry
    return [a + consts[0], lax.stop_gradient(a) * b, c * frozen(b)], [frozen(c) + x[0]]


def integers(consts, carry, x):
    """The middle leaf is an integer: a float goes in, and another comes out, without a slope."""
    a, n, c = carry
    table = jnp.array([0.5, 1.5, 2.5])
    return [
        a * jnp.cos(x[0]),
        n + 1 + (a > 9.0).astype(int),
        c + table[n % 3] * consts[0],
    ], [n * 2, a * n.astype(float)]


def overwritten(consts, carry, x):
    """Nothing of the initial values is left after a step."""
    a, b, c = carry
    return [x[0] * 2.0, a * 1.5, jnp.ones_like(c)], [b + c]


def called(consts, carry, x):
    """Through a call, branches and an inner loop."""
    a, b, c = carry
    a = jax.jit(lambda a, b: a * 1.1)(a, b)
    b = lax.cond(b > 0, lambda b, x: b * x, lambda b, x: b - 1.0, b, x[0])
    c = lax.fori_loop(0, 2, lambda _, c: c * consts[0] + b, c)
    return [a, b, c], [a * 1.0]


BODIES = (chain, ring, two_islands, compared, stopped, integers, overwritten, called)


def loop_of(body):
    init = [0.3, 1 if body is integers else 0.4, 0.7]
    return make_loop(body, [0.8], init, [0.2 + 0.3 * np.arange(STEPS)])


def is_float(value):
    return np.issubdtype(np.asarray(value).dtype, np.inexact)


def reached(loop, operands):
    """Mark the inputs (const, carry, xs) that move outputs (carry, ys), after any number of
    steps."""
    inputs = [*operands.consts, *operands.init, *operands.xs]
    moving = [i for i, v in enumerate(inputs) if is_float(v)]
    carry_count = loop.carry_count

    def unrolled(*moved):
        values = list(inputs)
        for i, v in zip(moving, moved, strict=True):
            values[i] = v
        consts, carry, xs = parts(values, loop.const_count, loop.carry_count)
        seen = [list(carry)]
        rows = []
        for step in range(STEPS):
            outs = _jax.call_jaxpr(loop.body)(*consts, *carry, *(x[step] for x in xs))
            carry, y = parts(outs, carry_count)
            seen.append(carry)
            rows.append(y)
        stacked = [*zip(*seen, strict=True), *zip(*rows, strict=True)]
        # No slope leads to an integer.
        return [jnp.stack([jnp.asarray(v, float) for v in values]) for values in stacked]

    values = [jnp.asarray(inputs[i]) for i in moving]
    of_outputs = jax.jit(jax.jacfwd(unrolled, range(len(moving))))(*values)
    table = np.zeros((len(inputs), len(of_outputs)), bool)
    for out, of_inputs in enumerate(of_outputs):
        for i, slopes in zip(moving, of_inputs, strict=True):
            table[i, out] = bool((np.asarray(slopes) != 0).any())
    return table


def subsets(count):
    return itertools.product([False, True], repeat=count)


def nonzero(flags, loop):
    """Flags of the inputs, as a rule has them: for the predicate's constants too."""
    return Operands([], *parts(flags, loop.const_count, loop.carry_count))


def flags_of(found):
    return [bool(f) for f in found]


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_against_the_jacobian(body):
    loop, operands = loop_of(body)
    inputs = [*operands.consts, *operands.init, *operands.xs]
    table, n = reached(loop, operands), loop.carry_count
    floats = np.array(list(map(is_float, inputs)))
    for flags in subsets(len(inputs)):
        moving = np.array(flags) & floats
        active = activity.forward_activity(loop, nonzero(flags, loop))
        outputs = table[moving].any(0)
        consts, _, xs = parts(moving, loop.const_count, n)
        assert flags_of(active.consts) == flags_of(consts)
        assert flags_of(active.xs) == flags_of(xs)
        assert flags_of(active.outputs) == flags_of(outputs)

        for wanted in ([True] * len(outputs), *np.eye(len(outputs), dtype=bool)):
            live = activity.backward_activity(loop, active, *parts(wanted, n)[:2])
            targets = outputs & wanted
            reaching = np.array(active.inputs) & table[:, targets].any(1)
            assert flags_of(live.inputs) == flags_of(reaching)
            assert flags_of(live.ys) == flags_of(targets[n:])

        both = activity.moving_activity(loop, nonzero(flags, loop))
        reaching = np.array(active.inputs) & table[:, outputs].any(1)
        assert flags_of(both.inputs) == flags_of(reaching)
        assert flags_of(both.ys) == flags_of(active.ys)


@pytest.mark.slow
@pytest.mark.parametrize("body", [chain, two_islands, integers], ids=lambda f: f.__name__)
def test_parts_of_what_is_active(body):
    """Flags that have a place for each active input, or output."""
    loop, operands = loop_of(body)
    table, n = reached(loop, operands), loop.carry_count
    everything = [True] * table.shape[0]
    active = activity.forward_activity(loop, nonzero(everything, loop))
    places = np.flatnonzero(active.inputs)
    for flags in subsets(len(places)):
        some = activity.linear_activity(loop, active, flags)
        chosen = np.zeros(table.shape[0], bool)
        chosen[places] = flags
        outputs = table[chosen].any(0)
        moving = chosen.copy()
        moving[loop.const_count :][:n] |= outputs[:n]
        assert flags_of(some.inputs) == flags_of(moving & table[:, outputs].any(1))
    places = np.flatnonzero(active.outputs)
    for flags in subsets(len(places)):
        some = activity.cotangent_activity(loop, active, flags)
        chosen = np.zeros(table.shape[1], bool)
        chosen[places] = flags
        assert flags_of(some.inputs) == flags_of(active.inputs & table[:, chosen].any(1))


def test_zeros_that_a_rule_makes_are_tangents():
    """They are numbers: only what is symbolically zero has none."""

    def body(consts, carry, x):
        a, b, c = carry
        return [a * 1.1, b * 1.5, c + second_only(a, b)], []

    loop, _ = make_loop(body, [], [0.3, 0.4, 0.5], length=3)
    active = activity.forward_activity(loop, Operands([], [], [True, False, False], []))
    assert active.carry == (True, False, True)
    live = activity.backward_activity(loop, active, [False, False, True], [])
    assert live.carry[0] is False


def test_found_once():
    loop, _ = loop_of(chain)
    flags = Operands([], [True], [False, True, False], [False])
    first = activity.forward_activity(loop, flags)
    assert activity.forward_activity(loop, flags) is first
    assert activity.backward_activity(loop, first, first.carry, first.ys) is (
        activity.backward_activity(loop, first, first.carry, first.ys)
    )


def test_either():
    a = Active((True, False), (False,), (), (True,))
    b = Active((False, False), (True,), (), (True,))
    assert activity.either(a, b) == Active((True, False), (True,), (), (True,))
