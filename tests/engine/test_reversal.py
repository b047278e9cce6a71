"""Reversal of a loop: what is saved of its carry, and which products are deferred."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import loopkit
from loopkit import Plan, _jax
from loopkit._buffers.slices import read, write, write_p
from loopkit._buffers.window import Window
from loopkit._engine.derivative import deferred_products
from loopkit._engine.derivative.reversal import can_replay, covers, reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import Active, Operands
from loopkit._engine.primitives import evaluated_p, forward_p, pullback_p
from loopkit._engine.sweeps.step import StepReversal
from loopkit._jaxprs import cost, equations

from .small_loops import assert_same, make_loop

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
    """Return the products of a step with one that is large enough."""
    numbers = lambda *shape: np.sin(np.arange(np.prod(shape))).reshape(shape)

    def dense(consts, carry, x):
        return [jnp.tanh(consts[0] @ carry[0] + x[0])], []

    operands = [numbers(SIZE, SIZE)], [numbers(SIZE)], [numbers(12, SIZE)]
    moving, plan = Operands([], [True], [True], [False]), Plan(3, segment, store)
    return reversed_loop(dense, *operands, checkpoints=plan, moving=moving).products


@pytest.mark.parametrize("store", ["carries", "residuals"])
def test_products_are_put_off_over_several_steps(store, monkeypatch):
    """A product of a single step is not deferred. A factor that is a row is not kept twice."""
    monkeypatch.setattr(deferred_products, "SMALLEST", 64)
    assert products(1, store) is None
    found = products(2, store)
    assert found.put_off == (True, False)
    assert (len(found.factors), len(found.rows)) == (1, 1)


def test_a_row_is_known_by_its_place(monkeypatch):
    """Behind constants, what is computed of them once, and slices; behind other leaves, a row."""
    monkeypatch.setattr(deferred_products, "SMALLEST", 64)

    def body(consts, carry, x):
        (w, b), (n, g, h) = consts, carry
        new = jnp.tanh(w @ h * jnp.exp(b) + x[0] * n)
        return [n + 1, jnp.cos(g), new * jnp.sin(g)], []

    operands = [jnp.ones((SIZE, SIZE)), jnp.ones(SIZE)], [0, 0.3, jnp.ones(SIZE)]
    moving, found = Operands([], [True, False], [False, True, True], [False]), {}
    for store in ("carries", "residuals"):
        plan, xs = Plan(3, 2, store), [jnp.ones((12, SIZE))]
        how = reversed_loop(body, *operands, xs, checkpoints=plan, moving=moving)
        inputs = _jax.open_jaxpr(how.backward).invars
        found[store] = {inputs.index(v): i for v, i in how.products.rows.items()}
    assert found == {"carries": {4: 1}, "residuals": {4: 0}}


def test_steps_that_ask_the_host_are_not_run_again():
    """However many they are, where nothing else is said, and their number is known."""

    def body(consts, carry, x):
        kind = jax.ShapeDtypeStruct((), carry[0].dtype)
        said = io_callback(np.asarray, kind, jax.lax.stop_gradient(carry[0]))
        return [jnp.sin(carry[0]) * said, carry[1] + 1], []

    moving, init = Operands([], [], [True, False], []), [0.3, 0]
    silent = lambda consts, carry, x: ([jnp.sin(carry[0]), carry[1] + 1], [])
    of = lambda body, **how: reversed_loop(body, [], init, moving=moving, **how).plan
    assert of(body, length=10**9).keeps_all
    assert not of(silent, length=10**9).keeps_all
    for how in [{"length": 9, "checkpoints": Plan(2)}, {"cond": lambda _, c: c[1] < 5}]:
        with pytest.raises(NotImplementedError, match="io_callback"):
            of(body, **how)


def test_a_leaf_that_steps_do_not_read():
    """The cotangent of its old value is zero."""
    body = lambda consts, carry, x: ([carry[1] * 2.0, jnp.sin(carry[1])], [])
    moving = Operands([], [], [True, True], [])
    how = reversed_loop(body, [], [0.3, 0.5], length=6, checkpoints=Plan(2), moving=moving)
    (stored,) = jax.jit(_jax.call_jaxpr(how.remaking))(0.5)
    given = [stored, 3.0, 4.0]
    assert_same(jax.jit(_jax.call_jaxpr(how.backward))(*given), [0.0, 6.0 + 4.0 * np.cos(0.5)])


def test_loops_that_are_run_again_make_residuals_alone():
    """Going back, of what an inner loop adds up nobody reads the sum."""

    def body(consts, carry, x):
        go = lambda c: (c[0] < 500) & (c[1] > 0.2)
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * 0.9), c[2] + c[1])
        _, h, total = loopkit.while_loop(go, step, (0, *carry), checkpoints="all")
        return [h + 0.3, total], []

    moving = Operands([], [], [True, True], [])
    how = reversed_loop(body, [], [0.3, 0.5], length=4, checkpoints="all", moving=moving)
    found = {e.primitive for e in equations.all_equations(how.backward)}
    assert evaluated_p in found
    assert forward_p not in found


def test_cotangents_that_nobody_asks_for():
    """They are not computed, in inner loops neither."""

    def body(consts, carry, x):
        step = lambda h: jnp.sin(h * consts[0])
        return [loopkit.fori_loop(0, 3, lambda _, h: step(h), carry[0])], []

    loop, _ = make_loop(body, [0.7], [0.3], length=4, checkpoints="all")
    both, one = (forward_activity(loop, Operands([], [a], [True], [])) for a in (True, False))
    how = reversal(loop, both, one)
    (eqn,) = (e for e in _jax.open_jaxpr(how.backward).eqns if e.primitive is pullback_p)
    assert len(eqn.outvars) == 1
    given = jax.jit(_jax.call_jaxpr(how.forward))(0.7, 0.3)[1:]
    found = jax.jit(_jax.call_jaxpr(how.backward))(0.7, *given, 1.0)
    assert_same(found, [jax.grad(lambda h: body([0.7], [h], [])[0][0])(0.3)])


def of_lanes(**settings):
    """Three lanes, of two, four and six steps."""

    def body(consts, carry, x):
        h, n = carry
        return [jnp.sin(h * n.astype(float)) + x[0], n + 1], []

    how = {"cond": lambda limit, carry: carry[1] < limit[0], "cond_consts": [np.array([3, 5, 7])]}
    init, xs = [np.array([0.3, 0.5, 0.7]), np.ones(3, int)], [np.cos(np.arange(9.0))]
    return make_loop(body, [], init, xs, **how, **settings)


def test_lanes_that_have_stopped_stay_as_they_are():
    """Also where their steps are taken again: a step beyond may be one that does not end."""
    loop, given = of_lanes(checkpoints=Plan(2))
    how = reversal(loop, forward_activity(loop, Operands([], [], [True, False], [True])))
    assert how.saved == (True, True)
    steps = np.array([2, 4, 6], np.int32)
    carries = [given.init]
    for k, x in enumerate(given.xs[0]):
        h, n = carries[-1]
        on = k < steps
        carries.append([np.where(on, np.sin(h * n) + x, h), np.where(on, n + 1, n)])
    again = StepReversal(how, given, steps, None).advance(list(map(jnp.asarray, carries[1])), 1, 4)
    assert_same(again, carries[5])


def test_what_was_saved_for_more_is_enough_for_less():
    flags = lambda *of: Active(*((f,) for f in of))
    a, b, both = (flags(*f) for f in [(1, 0, 1, 0), (0, 1, 1, 0), (1, 1, 1, 0)])
    for less in (a, b, both, flags(0, 0, 0, 0)):
        assert covers(both, less)
    assert covers(a, a)
    assert not covers(a, b)
    assert not covers(b, a)
    assert not covers(a, both)


def test_what_steps_are_taken_again_from():
    """A leaf that neither derivatives nor what is saved depend on may be left out, no other."""

    def body(consts, carry, x):
        a, b, c = carry
        return [jnp.sin(a), jnp.sin(b * a), c * 0.9], []

    init, moving = [0.3, 0.5, 0.7], Operands([], [], [True, True, True], [])
    how = reversed_loop(body, [], init, length=6, checkpoints=Plan(2), moving=moving)
    assert how.saved == (True, True, False)
    for saved in [(True, True, False), (True, True, True)]:
        assert can_replay(how.loop, how.split, saved)
    for saved in [(True, False, False), (False, True, True), (False, False, False)]:
        assert not can_replay(how.loop, how.split, saved)


def summing(consts, carry, x):
    """Sum leaves of three kinds: the derivative reads one, rerun steps read one, and nothing reads
    one."""
    (w, e, b, unused), (h, n, s) = consts, carry
    new = jnp.sin(w * h * n.astype(float) * jnp.exp(e)) + b + x[0] * h + x[1]
    return [new, n + 1, s + h + unused + x[2]], []


SUMMING = [0.3, 0.4, 0.5, 0.7], [0.2, 1, 0.4], [np.arange(6.0)] * 3


@pytest.mark.every_case
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("again", [False, True])
def test_what_going_back_reads(again, lanes):
    """Going back also reads the carry with which stopped lanes go on."""
    consts, init, xs = SUMMING
    if lanes:
        init = [np.full(lanes, v) for v in init]
    cond = {"cond": lambda limit, carry: carry[1] < limit[0], "cond_consts": [5]}
    moving = Operands([], [True, False, True, True], [True, False, True], [True] * 3)
    how = reversed_loop(
        summing, consts, init, xs, **cond, checkpoints=Plan(2) if again else "all", moving=moving
    )
    carry = [again or lanes > 0, True, False]
    wanted = [False, True, True, again, False, *carry, True, again, False]
    assert how.reads == wanted


def test_the_loop_that_saves_the_same():
    """Without results that nobody wants, but with what residuals are made of, if it has them."""

    def body(consts, carry, x):
        return [jnp.sin(carry[0])], [jnp.exp(x[0]) * carry[0], x[1] * 2.0]

    def prune_results(checkpoints):
        xs, moving = [np.arange(6.0)] * 2, Operands([], [], [True], [False, False])
        how = reversed_loop(body, [], [0.3], xs, checkpoints=checkpoints, moving=moving)
        return how.prune_results([True, False, False])

    for checkpoints, x in [("all", True), (Plan(2), False)]:
        few = prune_results(checkpoints)
        assert list(few.operands) == [True, x, False]
        assert list(few.results) == [True, False, False]


def test_a_counter_is_stored_nowhere():
    """Wherever it is in the carry; of a row, the rest is in its place."""

    def body(consts, carry, x):
        h, k, n = carry
        return [jnp.sin(h * n) * jnp.cos(h) * x[0], k * 2, n + 3], []

    init, xs = [0.3, 1, 1], [np.arange(6.0)]
    moving = Operands([], [False], [True, False, False], [True])
    how = reversed_loop(body, [0.5], init, xs, checkpoints="all", moving=moving)
    kinds = [t.dtype.kind for t in how.split.stored_types]
    counted = [2 if kind == "i" else None for kind in kinds]
    assert how.counted_rows == counted
    assert set(kinds) == {"i", "f"}
    assert len(how.row_types) == len(kinds) - 1
    row = list(range(len(kinds)))
    assert how.restore_counters(how.drop_counters(row), [None, None, kinds.index("i")]) == row


def test_the_same_how_is_not_made_anew():
    loop, _ = of_lanes(checkpoints=Plan(2))
    how = reversal(loop, forward_activity(loop, Operands([], [], [True, False], [True])))
    assert how.without((False, False)) is how
    assert how.without((True, False)).unused_init == (True, False)
    assert how.without((True, False)) is how.without((True, False))


@pytest.mark.parametrize("lanes", [False, True])
def test_no_products_of_lanes_are_put_off(lanes, monkeypatch):
    """The plan does not count on deferred products, either."""
    monkeypatch.setattr(cost, "SMALLEST", 64)

    def dense(consts, carry, x):
        return [jnp.tanh(carry[0] @ consts[0]), carry[1] + 1], []

    init = [np.ones((3, SIZE)), np.zeros(3, int)]
    cond = lambda limit, carry: carry[1] < limit[0] if lanes else carry[1][0] < limit[0]
    how = {"cond": cond, "cond_consts": [5], "length": 9, "checkpoints": Plan(2, 2)}
    moving = Operands([], [True], [True, False], [])
    step = reversed_loop(dense, [np.ones((SIZE, SIZE))], init, **how, moving=moving).plan.step
    of_products = 8 * 3 * SIZE * 2, 8 * SIZE * SIZE
    assert (step.factor_bytes, step.product_bytes) == ((0, 0) if lanes else of_products)


ROW = Window((0,), (0, 0), (1, 2), "drop", wrap=False)


def reads_what_it_writes(consts, carry, x):
    h, n, rows = carry
    rows = write(rows, jnp.full((1, 2), jnp.sin(h)), n[None], ROW)
    new, rows = read(rows, n[None], ROW)
    return [jnp.cos(new).sum(), n + 1, rows], []


def reads_what_was_written(consts, carry, x):
    h, n, rows = carry
    old, rows = read(rows, (n - 1)[None], ROW)
    return [jnp.cos(h) * 0.5, n + 1, write(rows, jnp.sin(old * h), n[None], ROW)], []


def of_rows(body, checkpoints, count=30):
    init, moving = [0.3, 1, np.ones((count, 2))], Operands([], [], [True, False, True], [])
    return reversed_loop(
        body, [], init, length=5, checkpoints=checkpoints, moving=moving, buffers=[2]
    )


def test_whether_a_step_reads_what_it_writes():
    assert of_rows(reads_what_it_writes, Plan(2)).rereads
    assert not of_rows(reads_what_was_written, Plan(2)).rereads


def test_rows_written_once_are_not_cleared():
    """Nobody asks for the cotangent of the old entries; the buffer is not the first leaf."""
    how = of_rows(reads_what_was_written, Plan(2))
    count = lambda j: sum(e.primitive is write_p for e in equations.all_equations(j))
    assert count(how.without((False, False, True)).backward) == count(how.backward) - 1
    assert count(how.without((True, False, False)).backward) == count(how.backward)


def test_where_buffers_are_brought_back():
    """Not where the residuals of all steps are kept, nor where a log would be larger."""
    assert of_rows(reads_what_was_written, Plan(2)).undo is not None
    assert of_rows(reads_what_was_written, "all").undo is None


@pytest.mark.parametrize(("checkpoints", "again"), [("all", False), (Plan(2), True)])
def test_fewer_leaves_of_steps_that_are_stored(checkpoints, again):
    """A step is differentiated for fewer leaves only where it runs again."""

    def body(consts, carry, x):
        return [jnp.sin(carry[0]), carry[1] * jnp.cos(carry[0] * carry[1])], []

    loop, _ = make_loop(body, [], [0.3, 0.5], length=6, checkpoints=checkpoints)
    both, one = (
        forward_activity(loop, Operands([], [], moving, []))
        for moving in ([True, True], [False, True])
    )
    stored = reversal(loop, both)
    fewer = reversal(loop, both, one)
    assert (fewer.split is not stored.split) == again
    assert any(key[:2] == ("linearised", one) for key in loop.step_memory) == again
