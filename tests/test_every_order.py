"""Every loop of the table in value, both first derivatives and a second one, as one program.

So are loops over buffers, and loops whose checkpoints are in the host's memory. `test_value`,
`test_jvp`, `test_vjp` and `test_second_order` ask for each order by itself, in all ways.
"""

from itertools import cycle

import jax
import pytest

from buffer_bodies import XS, W, looped, queue, reference, ring, viterbi
from derivatives import assert_close, expected_orders, in_numpy, orders
from loopkit import Plan
from problems import CHECKPOINTS, PROBLEMS, Problem, named

SECOND = "rf", "rr", "fr"
WAYS = [
    pytest.param(*way, id="-".join((way[0].name, *map(str, way[1:]))))
    for way in zip(PROBLEMS, cycle(SECOND), cycle(CHECKPOINTS), strict=False)
]


def assert_orders(loop, x, second, wanted):
    got = jax.jit(lambda x: orders(loop, x, second))(x)
    assert got.keys() == wanted.keys()
    for pattern, value in got.items():
        try:
            assert_close(value, wanted[pattern])
        except AssertionError as error:
            error.add_note(f"of {pattern or 'the value'}")
            raise


@pytest.mark.every_case
@pytest.mark.parametrize(("problem", "second", "checkpoints"), WAYS)
def test_every_order(problem: Problem, second, checkpoints):
    loop = problem.flat_loop(checkpoints)
    assert_orders(loop, problem.vector(), second, expected_orders(problem.name, second))


LOGGED = Plan(3, 2, "residuals")
"""Checkpoints without the buffer: steps log what they write over."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kind", "checkpoints", "second"),
    [
        pytest.param(ring, "while", LOGGED, "fr", id="undone"),
        pytest.param(viterbi, "scan", Plan(1), "rf", id="one checkpoint"),
        pytest.param(queue, "fori", "all", "rr", id="residuals"),
    ],
)
def test_every_order_of_buffers(body, kind, checkpoints, second):
    of_w = lambda f: lambda w: f(XS, w)[None]
    wanted = in_numpy(lambda w: orders(of_w(reference(body)), w, second), W)
    assert_orders(of_w(looped(body, kind, checkpoints)), W, second, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "second"),
    [
        ("while_scalar", Plan(100, segment=2, host=True), "fr"),
        ("scan_until", Plan(3, segment=2, store="residuals", host=True), "rr"),
    ],
    ids=["segments", "residuals"],
)
def test_every_order_from_the_host(name, plan, second):
    (problem,) = named(name)
    loop = problem.flat_loop(plan, max_steps=50)
    assert_orders(loop, problem.vector(), second, expected_orders(name, second))
