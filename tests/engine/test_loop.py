"""The description of a loop: records fit jaxprs, and what drops or adds a leaf takes them along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._engine.derivative.write_log import with_log
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import (
    Active,
    CarryLeaf,
    Const,
    Input,
    Operands,
    Output,
    kept,
    parts,
)
from loopkit._engine.passes.dual_loop import (
    active_inputs,
    dual_loop,
    replace_active,
)
from loopkit._engine.passes.unused import prune

from .small_loops import assert_same, make_loop, run

LENGTH = 4


def scan(**settings):
    """Two chains that have nothing to do with each other, and an accumulator of both."""

    def body(consts, carry, x):
        (v, w), (a, b, total), (p, q) = consts, carry, x
        a, b = jnp.sin(v * a + p), jnp.cos(w * b) * q
        return [a, b, total + a.sum() + b], [a * 2.0, b + w, total]

    xs = [np.sin(np.arange(2.0 * LENGTH)).reshape(2, LENGTH), np.cos(np.arange(LENGTH))]
    init = [np.array([0.3, 0.1]), 0.6, 0.0]
    how = {"x_axes": [1, 0], "y_axes": [1, 0, 0]}
    return make_loop(body, [0.8, 1.1], init, xs, **how, **settings)


def until():
    """A predicate of one of three chains, with a constant that it does not read."""

    def body(consts, carry, x):
        (v, w), (a, b, c) = consts, carry
        return [a + v, jnp.sin(w * b), c * 1.5], [b, c + x[0]]

    return make_loop(
        body,
        [0.4, 0.9],
        [0.1, 0.2, 0.3],
        [np.arange(5.0)],
        cond=lambda limits, carry: carry[0] < limits[1],
        cond_consts=[7.0, 1.2],
    )


# ---------------------------------------------------------------- records


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("consts", Const()),
        ("carry", CarryLeaf()),
        ("xs", Input()),
        ("ys", Output()),
    ],
)
def test_records_have_to_fit(field, more):
    loop, _ = until()
    records = getattr(loop, field)
    for wrong in (records[:-1], (*records, more)):
        with pytest.raises(AssertionError, match="a record for each"):
            loop.replace(**{field: wrong})


def test_records_of_other_kinds_make_up_for_nothing():
    loop, _ = until()
    with pytest.raises(AssertionError, match="a record for each output"):
        loop.replace(consts=loop.consts[:-1], carry=(*loop.carry, CarryLeaf()))
    # The body may have lost a leaf that the predicate still takes.
    body, _ = _jax.dce(loop.body, [True, True, False, True, False], [True] * 6)
    smaller = {"carry": loop.carry[:-1], "consts": (*loop.consts, Const()), "ys": loop.ys[:-1]}
    with pytest.raises(AssertionError, match="a predicate of the carry"):
        loop.replace(body=body, **smaller)


def test_a_predicate_has_to_fit():
    loop, _ = until()
    for count in (loop.cond_const_count - 1, loop.cond_const_count + 1):
        with pytest.raises(AssertionError, match="a predicate of the carry"):
            loop.replace(cond_const_count=count)
    with pytest.raises(AssertionError, match="a predicate of the carry"):
        loop.replace(cond=scan()[0].body)


def test_what_nothing_is_said_of():
    """Neither of a leaf nor of a loop."""
    assert CarryLeaf() == ("", False, False, False, None)
    assert (Const(), Input(), Output()) == ((0,), (0, 0), (0, False))
    loop, operands = make_loop(lambda consts, carry, x: (carry, []), [], [0.5], length=3)
    assert operands.flat == [0.5]
    assert not any((loop.reverse, loop.masks_itself, loop.lasting))
    assert (loop.unroll, loop.min_active_lanes) == (1, 0)


def test_counts_and_types():
    loop, operands = scan()
    assert (loop.const_count, loop.carry_count, loop.xs_count, loop.ys_count) == (2, 3, 2, 3)
    assert loop.operand_count == len(operands.flat) == 7
    assert loop.primal_counts == (7, 6)
    assert [t.shape for t in loop.carry_types] == [v.shape for v in operands.init]
    assert [t.shape for t in loop.xs_types] == [x.shape for x in operands.xs]
    assert [t.shape for t in loop.ys_types] == [v.shape for v in run(loop, operands)[3:]]
    found, rest = loop.split([*operands.flat, "more"])
    assert all(a is b for a, b in zip(found.flat, operands.flat, strict=True))
    assert rest == ["more"]


def test_a_loop_is_only_itself():
    loop, _ = scan()
    assert loop != loop.replace()
    assert loop.derived("key", list) is loop.derived("key", list)
    assert loop.replace().memory == {}


def test_unrolled():
    loop, operands = scan()
    loop.derived("key", list)
    three = loop.unrolled(3)
    assert three.unroll == 3
    assert three.memory is loop.memory
    assert loop.unrolled(1) is loop
    assert_same(run(three, operands), run(loop, operands))
    # A loop with other equations has nothing in common with it.
    assert three.replace(reverse=True).memory is not loop.memory


def test_parts_and_flags():
    assert parts("abcdef", 1, 0, 3) == [["a"], [], ["b", "c", "d"], ["e", "f"]]
    assert kept("abc", [True, False, True]) == ["a", "c"]
    assert spread("xy", [True, False, True], "abc") == ["x", "b", "y"]
    with pytest.raises(ValueError, match="zip"):
        kept("abc", [True])


# ---------------------------------------------------------------- prune


ALL = [True] * 3


@pytest.mark.parametrize(
    ("make", "carry", "ys", "consts", "leaves", "xs"),
    [
        (scan, [1, 0, 0], [0, 0, 0], [1, 0], [1, 0, 0], [1, 0]),
        (scan, [0, 1, 0], [0, 1, 0], [0, 1], [0, 1, 0], [0, 1]),
        (scan, [0, 0, 0], [1, 0, 0], [1, 0], [1, 0, 0], [1, 0]),
        (scan, [0, 0, 0], [0, 0, 1], [1, 1], [1, 1, 1], [1, 1]),
        (scan, [1, 1, 1], [1, 1, 1], [1, 1], [1, 1, 1], [1, 1]),
        (scan, [0, 0, 0], [0, 0, 0], [0, 0], [0, 0, 0], [0, 0]),
        (until, [0, 0, 0], [1, 0], [1, 1], [1, 1, 0], [0]),
        (until, [0, 0, 1], [0, 0], [1, 0], [1, 0, 1], [0]),
        (until, [0, 0, 0], [0, 1], [1, 0], [1, 0, 1], [1]),
    ],
)
def test_prune(make, carry, ys, consts, leaves, xs):
    loop, operands = make()
    pruned = prune(loop, [*map(bool, carry), *map(bool, ys)])
    small, flags = pruned.loop, loop.split(pruned.operands)[0]
    wanted = [consts, leaves, xs]
    assert [list(map(int, f)) for f in flags[1:]] == wanted
    assert flags.cond_consts == ([False, True] if make is until else [])
    # Records go with their leaves.
    assert small.cond_const_count == sum(flags.cond_consts)
    assert small.carry == tuple(kept(loop.carry, leaves))
    assert small.xs == tuple(kept(loop.xs, xs))
    assert small.ys == tuple(kept(loop.ys, ys))
    of_all = run(loop, operands)
    got = pruned.map_results(run(small, small.split(pruned.map_operands(operands.flat))[0]))
    assert [v is not None for v in got] == list(map(bool, [*leaves, *ys]))
    assert_same(*(kept(v, pruned.results) for v in (got, of_all)))


# ---------------------------------------------------------------- the dual loop


def tangents_like(values, flags):
    return [
        np.asarray(np.cos(v + i)) for i, (v, f) in enumerate(zip(values, flags, strict=True)) if f
    ]


def jvp_step_by_step(loop, operands, active, tangents):
    """Results and tangents of the active outputs, of the loop written out."""
    inputs = [*operands.consts, *operands.init, *operands.xs]

    def unrolled(*moving):
        values = spread(moving, active.inputs, inputs)
        consts, carry, xs = parts(values, loop.const_count, loop.carry_count)
        ys = []
        for step in range(steps):
            x = [jnp.take(v, step, axis) for v, axis in zip(xs, loop.x_axes, strict=True)]
            outs = _jax.call_jaxpr(loop.body)(*consts, *carry, *x)
            carry, y = parts(outs, loop.carry_count)
            ys.append(y)
        stacked = zip(zip(*ys, strict=True), loop.y_axes, strict=True)
        return [*carry, *(jnp.stack(v, axis) for v, axis in stacked)]

    steps = 3 if loop.cond is not None else loop.length
    moving = list(map(jnp.asarray, kept(inputs, active.inputs)))
    results, moved = jax.jit(lambda p, t: jax.jvp(unrolled, p, t))(tuple(moving), tuple(tangents))
    return results, kept(moved, active.outputs)


NONZERO = [
    Operands([], [True, False], [True, False, False], [False, True]),
    Operands([], [True, True], [True, True, True], [True, True]),
    Operands([], [False, False], [False, True, False], [False, False]),
]


@pytest.mark.slow
@pytest.mark.parametrize("nonzero", NONZERO)
def test_the_dual_loop(nonzero):
    loop, operands = scan()
    active = forward_activity(loop, nonzero)
    rewritten = dual_loop(loop, active)
    assert dual_loop(loop, active) is rewritten
    dual = rewritten.loop
    assert dual.carry[:3] == loop.carry
    assert dual.consts == (*loop.consts, *kept(loop.consts, active.consts))
    assert dual.xs == (*loop.xs, *kept(loop.xs, active.xs))
    assert dual.ys == (*loop.ys, *kept(loop.ys, active.ys))
    inputs = [*operands.consts, *operands.init, *operands.xs]
    tangents = tangents_like(inputs, active.inputs)
    values, _ = dual.split(rewritten.map_operands([*operands.flat, *tangents]))
    results, moved = parts(
        rewritten.map_results(run(dual, values)), loop.carry_count + loop.ys_count
    )
    wanted, of_wanted = jvp_step_by_step(loop, operands, active, tangents)
    assert_same(results, wanted)
    assert_same(moved, of_wanted)


@pytest.mark.slow
def test_the_dual_of_a_loop_with_a_predicate():
    loop, operands = until()
    active = Active((True, True), (True, True, False), (False,), (True, False))
    rewritten = dual_loop(loop, active)
    dual = rewritten.loop
    assert dual.cond_const_count == loop.cond_const_count
    assert len(dual.cond.in_avals) == loop.cond_const_count + 5
    inputs = [*operands.consts, *operands.init, *operands.xs]
    tangents = tangents_like(inputs, active.inputs)
    values, _ = dual.split(rewritten.map_operands([*operands.flat, *tangents]))
    results, moved = parts(
        rewritten.map_results(run(dual, values)), loop.carry_count + loop.ys_count
    )
    assert_same(results, run(loop, operands))
    rows = [np.asarray(v) for v in jvp_step_by_step(loop, operands, active, tangents)[1]]
    assert_same([*moved[:2], moved[2][:3]], rows)
    assert not moved[2][3:].any()


def test_duals_of_buffers_are_buffers():
    def body(consts, carry, x):
        return [carry[0] * 2.0, carry[1] + 1.0], []

    loop, _ = make_loop(body, [], [0.5, np.ones(3)], length=2, buffers=[1])
    dual = dual_loop(loop, Active((), (True, True), (), ())).loop
    assert dual.is_buffer == (False, True, False, True)
    assert [leaf.name for leaf in dual.carry] == ["carry 0", "carry 1", "", ""]


def test_operands_that_move():
    loop, operands = until()
    active = Active((False, True), (True, False, False), (True,), (False, False))
    assert active_inputs(loop, operands.flat, active) == [
        operands.consts[1],
        operands.init[0],
        operands.xs[0],
    ]
    moved = replace_active(loop, operands.flat, active, ["w", "a", "x"])
    assert moved == [*operands.cond_consts, operands.consts[0], "w", "a", *operands.init[1:], "x"]


# ---------------------------------------------------------------- logs


def test_a_log_comes_after_the_ys():
    loop, operands = scan()
    outs = len(loop.body.out_avals)
    step = _jax.call_jaxpr(loop.body)
    body = _jax.trace_closed(
        lambda *values: [*step(*values), values[2] * 3.0, values[3]], loop.body.in_avals, "logged"
    )
    logged = with_log(loop, body)
    assert logged.ys == (*loop.ys, Output(0, log=True), Output(0, log=True))
    got = run(logged, operands)
    assert_same(got[:outs], run(loop, operands))
    assert [v.shape for v in got[outs:]] == [t.shape for t in logged.ys_types[-2:]]
    assert got[outs].shape == (LENGTH, 2)
    shorter = _jax.trace_closed(lambda *values: step(*values)[:-1], loop.body.in_avals, "shorter")
    with pytest.raises(AssertionError, match="a record for each output"):
        with_log(loop, shorter)
