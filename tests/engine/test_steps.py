"""Taking steps: how often and in which order, which rows and lanes, and in which runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit._engine import steps
from loopkit._engine.loop import Output
from loopkit._engine.steps import Steps
from loopkit._jaxprs import equations

from .small_loops import assert_same, make_loop, run

# ---------------------------------------------------------------- so many times


def in_order(repeats, times, *how):
    """The numbers that `body` is given, as digits of one."""
    body = lambda i, s: s * 16 + jnp.int64(i) + 1
    return repeats(times, body, jnp.int64(0), *how)


def digits(numbers):
    total = 0
    for i in numbers:
        total = total * 16 + i + 1
    return total


@pytest.mark.slow
def test_each_in_its_turn():
    """Several to an iteration or one, those left over too."""
    for unroll, part in ((1, 1), (3, 1), (2, 3)):
        of = jax.jit(lambda n, how=(unroll, part): in_order(steps.repeat, n, *how))
        for times in (0, 1, 3, 8):
            assert of(jnp.int32(times)) == digits(range(times)), (times, unroll, part)
    for unroll in (1, 2, 20):
        for times in (0, 1, 3, 4):
            assert in_order(steps.repeat, times, unroll) == digits(range(times))


def test_the_last_in_turn_first():
    of = jax.jit(lambda n: in_order(steps.repeat_backwards, n))
    for times in (0, 1, 3, 8):
        wanted = digits(range(times)[::-1])
        assert of(jnp.int32(times)) == in_order(steps.repeat_backwards, times) == wanted


def traced_for(repeats, times=None, **how):
    """Count the bodies and the loops in a program; None if the number of times is not known."""
    bodies = []

    def body(i, s):
        bodies.append(i)
        return s + i

    f = lambda n: repeats(n if times is None else times, body, jnp.int32(0), **how)
    text = str(jax.make_jaxpr(f)(jnp.int32(5)))
    return len(bodies), text.count("while[")


def test_no_more_of_a_program_than_is_run():
    """Bodies and loops."""
    of = lambda *args, **how: traced_for(steps.repeat, *args, **how)
    assert of(0) == (0, 0)
    assert of(1) == (1, 0)
    assert of(2) == of(9) == of(9, part=2) == of() == (1, 1)
    assert of(10, unroll=2) == (2, 1)
    assert of(11, unroll=2) == (3, 1)
    assert of(12, unroll=5) == (6, 2)
    assert of(3, unroll=5) == (3, 0)
    assert of(unroll=2) == (3, 2)
    assert of(part=2) == (2, 3), "whole parts, each a loop, and what is left"
    assert of(part=3, unroll=2) == (6, 3)


def test_quotients():
    """A quotient of known numbers is a number; any other is one division, which works for either
    sign."""
    assert steps.quotient(11, 4) == 2
    assert type(steps.quotient(11, 4)) is int
    jaxpr = jax.make_jaxpr(lambda n: steps.quotient(n, 4))(jnp.int32(11))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["div"]
    assert jax.jit(lambda n: steps.quotient(n, 4))(jnp.int32(11)) == 2


# ---------------------------------------------------------------- rows, lanes


@pytest.mark.slow
def test_rows():
    stack = np.arange(24.0).reshape(2, 3, 4)
    read = lambda row, **axes: steps.read_rows([stack, stack.T], row, **axes)
    assert_same(read(1), [stack[1], stack.T[1]])
    assert_same(read(1, axes=(1, 1)), [stack[:, 1], stack.T[:, 1]])
    assert_same(read(1, axes=(2, 0)), [stack[:, :, 1], stack.T[1]])
    new = -np.ones((2, 4))
    for axes, arrays in (((1, 1), [stack, stack + 1]), ((1, 0), [stack, stack.swapaxes(0, 1)])):
        written = steps.write_rows(arrays, [new, new], 2, axes)
        assert_same(steps.read_rows(written, 2, axes), [new, new])
        assert_same(steps.read_rows(written, 0, axes), steps.read_rows(arrays, 0, axes))


def test_rows_along_the_first_axis_where_nothing_is_said():
    stack = np.arange(6.0).reshape(2, 3)
    (written,) = steps.write_rows([stack], [-np.ones(3)], 1)
    assert_same([written], [np.array([[0.0, 1.0, 2.0], [-1.0, -1.0, -1.0]])])


def test_slices_of_a_step():
    for reverse, row in ((False, 1), (True, 3)):
        loop, operands = mixed(reverse=reverse)
        x = [operands.xs[0][:, row], operands.xs[1][row]]
        assert_same(steps.read_slices(loop, operands, 1), x)
    loop, operands = lanes_loop()
    assert steps.read_slices(loop, operands, 1) == []


def test_a_row_is_not_negative():
    """So nothing is computed to find out whether it is."""
    read = lambda a, row: steps.read_rows([a], row)
    write = lambda a, row: steps.write_rows([a], [a[0]], row)
    for f, slices in ((read, "dynamic_slice"), (write, "dynamic_update_slice")):
        jaxpr = jax.make_jaxpr(f)(jnp.ones((3, 2)), jnp.int32(1))
        names = {eqn.primitive.name for eqn in equations.all_equations(jaxpr)}
        assert slices in names
        assert not {"lt", "select_n"} & names


def test_lanes_that_are_held():
    active = jnp.asarray([True, False])
    new, old = jnp.ones((2, 3)), jnp.zeros((2, 3))
    wanted = np.array([[1.0] * 3, [0.0] * 3])
    assert_same(steps.select(active, [new, new[:, 0]], [old, old[:, 0]]), [wanted, wanted[:, 0]])
    turned = [v.T for v in (new, old)]  # another axis before the lanes
    assert_same(steps.select(active, turned[:1], turned[1:], 1), [wanted.T])
    of = lambda buffers, news, olds, **how: steps.hold(active, news, olds, buffers, **how)
    assert_same(of([False, True], [new] * 2, [old] * 2), [wanted, new])
    assert_same(of([True], [new] * 3, [old] * 3), [new, wanted, wanted])  # others are none
    assert_same(of((), [new], [old]), [wanted])
    assert_same(of([True, False], turned[:1] * 2, turned[1:] * 2, leading=1), [new.T, wanted.T])


def lanes_loop(**settings):
    """Lane i ends after i + 1 steps."""
    body = lambda consts, carry, x: (
        [carry[0] - 1, carry[1] * 1.5],
        [carry[1] + carry[0].astype(float)],
    )
    init = [np.arange(1, 5), np.linspace(0.1, 0.4, 4)]
    how = {"cond": lambda _, carry: carry[0] > 0, "length": 6}
    return make_loop(body, [], init, **how | settings)


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_lanes_that_are_left_when_a_loop_ends(left):
    """It goes on while more are active: of the four one ends with each step."""
    loop, operands = lanes_loop(min_active_lanes=left)
    found = steps.evaluate(loop, operands)
    assert (found[0] > 0).sum() == left
    taken = np.minimum(np.arange(1, 5), 4 - left)
    assert_same(found[:2], [np.arange(1, 5) - taken, operands.init[1] * 1.5**taken])


def test_rows_of_stopped_lanes():
    """They are zero, but for logs."""
    loop, operands = lanes_loop()
    _, _, rows = steps.evaluate(loop, operands)
    assert_same([rows > 0], [np.arange(6)[:, None] <= np.arange(4)])
    logged = loop.replace(ys=(Output(log=True),))
    assert_same([steps.evaluate(logged, operands)[2] > 0], [np.arange(6)[:, None] < [4] * 4])


def test_steps_of_lanes_are_counted():
    loop, operands = lanes_loop()
    state = steps.start(loop, operands)
    assert (state.count, list(state.lane_counts)) == (0, [0] * 4)
    state = steps.advance(loop, operands, state, 3)
    assert (state.count, list(state.taken)) == (3, [1, 2, 3, 3])
    state = steps.advance(loop, operands, state, 6)
    assert (state.count, list(state.taken)) == (4, [1, 2, 3, 4])
    assert Steps(state.count, [], [], None).taken == 4


# ---------------------------------------------------------------- whole loops


def mixed(**settings):
    """Rows along several axes, read and written; `settings` may bound it."""

    def body(consts, carry, x):
        (w,), (a, b), (p, q) = consts, carry, x
        return [a * w + p, jnp.sin(b) + q.sum()], [a * b, p - b]

    xs = [np.linspace(0, 1, 10).reshape(2, 5), np.cos(np.arange(15.0)).reshape(5, 3)]
    how = {"x_axes": [1, 0], "y_axes": [0, 1]}
    return make_loop(body, [0.9], [np.array([0.3, 0.4]), 0.5], xs, **how | settings)


def few(limit, **settings):
    return mixed(cond=lambda limits, carry: carry[1] < limits[0], cond_consts=[limit], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_whole_loops(unroll):
    for make in (mixed, lambda **how: few(0.9, **how), lambda **how: few(-9.0, **how)):
        for reverse in (False, True):
            loop, operands = make(unroll=unroll, reverse=reverse)
            assert_same(steps.evaluate(loop, operands), run(loop, operands))


@pytest.mark.slow
def test_some_steps_and_then_the_others():
    for loop, operands in (mixed(), few(9.0)):
        state = steps.advance(loop, operands, steps.start(loop, operands), 2)
        assert state.count == 2
        state = steps.advance(loop, operands, state, 5)
        assert state.count == 5
        assert_same([*state.carry, *state.ys], run(loop, operands))


def test_whether_it_goes_on():
    for (loop, operands), last in ((mixed(), 5), (few(9.0), 5), (few(0.0), 0)):
        state = steps.start(loop, operands)
        at = lambda n, s=state: s._replace(count=jnp.int32(n))
        found = [bool(steps.goes_on(loop, operands, at(n), 5)) for n in range(7)]
        assert found == [n < last for n in range(7)]


def test_rows_in_reverse():
    """Those that are read, where none is written, and the other way round."""
    read = lambda consts, carry, x: ([carry[0] * 0.5 + x[0]], [])
    write = lambda consts, carry, x: ([carry[0] * 0.5], [carry[0]])
    more = {"cond": lambda _, carry: carry[0] < 9, "reverse": True}
    for loop, operands in (
        make_loop(read, [], [0.5], [np.arange(4.0)], **more),
        make_loop(write, [], [0.5], length=4, **more),
    ):
        assert_same(steps.evaluate(loop, operands), run(loop, operands))


@pytest.mark.parametrize("unroll", [1, 3])
def test_a_step_that_does_not_count_prints_nothing(unroll, capfd):
    def body(consts, carry, x):
        jax.debug.print("at {}", carry[0])
        return [carry[0] + 1], []

    loop, operands = make_loop(body, [], [0], cond=lambda _, carry: carry[0] < 4, unroll=unroll)
    jax.block_until_ready(jax.jit(lambda: steps.evaluate(loop, operands))())
    jax.effects_barrier()
    assert capfd.readouterr().out == "".join(f"at {i}\n" for i in range(4))


def test_without_a_bound():
    body = lambda consts, carry, x: ([carry[0] * consts[0], carry[1] + 1], [])
    cond = lambda limits, carry: carry[0] < limits[0]
    for unroll in (1, 3):
        loop, operands = make_loop(
            body, [1.5], [0.1, 0], cond=cond, cond_consts=[2.0], unroll=unroll
        )
        assert_same(steps.evaluate(loop, operands), run(loop, operands))


def names_in(loop, operands):
    jaxpr = jax.make_jaxpr(lambda: steps.evaluate(loop, operands))()
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_how_it_is_run():
    """A loop of known length as lax has it; of no steps, no loop at all."""
    body = lambda consts, carry, x: ([carry[0] * 2.0], [carry[0]])
    of = lambda length, **how: names_in(*make_loop(body, [], [0.5], length=length, **how))
    assert of(3) == of(1) == ["scan"]
    along_another = make_loop(
        lambda consts, carry, x: (carry, [x[0], x[0]]), [], [0.5], [np.ones((2, 5))], x_axes=[1]
    )
    assert "scan" not in names_in(*along_another)
    for empty in (of(0), of(0, cond=lambda _, carry: carry[0] < 1)):
        assert not {"scan", "while", "lt"} & set(empty)
