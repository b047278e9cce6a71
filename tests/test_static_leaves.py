"""Leaves that are not arrays: models with functions in them, strings, settings, in every loop."""

import enum
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from loopkit import TensorArray
from turns import in_turn


class Norm(enum.Enum):
    L2 = 2


class Setting:
    """Equal to others of the same number, and not the same."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    __hash__ = None


def model(w, activation=jnp.tanh):
    return {"w": w, "act": activation, "name": "cell", "norm": Norm.L2, "set": Setting(3)}


def advanced(m, x):
    assert m["name"] == "cell"
    assert m["norm"] is Norm.L2
    assert m["set"].number == 3
    return {**m, "w": m["act"](m["w"] * x + 0.1)}


XS = jnp.linspace(0.3, 1.2, 5)


def scanned(w):
    last, (label, ws) = loopkit.scan(
        lambda m, x: (advanced(m, x["x"]), (x["label"], m["w"])), model(w), {"x": XS, "label": "a"}
    )
    assert label == "a"
    assert last["act"] is jnp.tanh
    return last["w"] + ws.sum()


def stopping(w):
    until = lambda m, y: m["act"](m["w"]) + y[0] > 1e3
    step = lambda m, x: (advanced(m, x), (m["w"], m["act"]))
    last, (ws, act), info = loopkit.scan(step, model(w), XS, until=until, return_info=True)
    assert act is jnp.tanh
    return last["w"] + ws.sum() + info.steps.astype(float)


def last_only(w):
    step = lambda m, x: (advanced(m, x), {"w": m["w"], "by": m["act"]})
    last, y = loopkit.scan(step, model(w), XS, out_axes=None, truncate=None)
    assert y["by"] is jnp.tanh
    return last["w"] + y["w"]


def whiling(w):
    def goes_on(c):
        return c["m"]["act"](1.0) * c["i"] < 3.5

    def body(c):
        return {"i": c["i"] + 1, "m": advanced(c["m"], XS[0])}

    return loopkit.while_loop(goes_on, body, {"i": 0, "m": model(w)}, max_steps=9)["m"]["w"]


def counting(w):
    return loopkit.fori_loop(0, 5, lambda i, m: advanced(m, XS[i]), model(w))["w"]


def buffered(w):
    def body(i, m):
        rows = m["rows"].at[i].set(m["act"](m["w"] + (m["rows"][i - 1] if i is None else 0)))
        return {**m, "rows": rows, "w": m["w"] * 0.9}

    init = {**model(w), "rows": jnp.zeros(5)}
    named = loopkit.fori_loop(0, 5, body, init, buffers=lambda m: m["rows"])
    flags = loopkit.fori_loop(0, 5, body, init, buffers={k: k == "rows" for k in init})
    return named["rows"].sum() + flags["rows"].prod()


def listed(w):
    def step(array, x):
        assert array[0]["act"] is jnp.tanh
        return array.append(model(array[-1]["w"] * x)), None

    array, _ = loopkit.scan(step, TensorArray.empty(6, model(w)).append(model(w)), XS)
    stacked = array.stack()
    assert stacked["name"] == "cell"
    return stacked["w"].sum()


def nested(w):
    step = lambda m, x: loopkit.scan(lambda m, _: (advanced(m, x), m["w"]), m, None, 2)
    last, ws = loopkit.scan(step, model(w), XS, checkpoints=2)
    return last["w"] + ws.sum()


def of_functions_alone(w):
    """No array in the carry."""
    (act, _), ys = loopkit.scan(lambda c, x: (c, c[0](x * w)), (jnp.tanh, "red"), XS)
    assert act is jnp.tanh
    return ys.sum()


LOOPS = [scanned, stopping, last_only, whiling, counting, buffered, listed, nested]
LOOPS += [of_functions_alone]


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", in_turn(LOOPS, of=3))
def test_derivatives(loop):
    """Under disable_jit each loop is one of Python's, on the leaves as they are."""
    w = jnp.asarray(0.7)
    with jax.disable_jit():
        wanted = loop(w)
        slope = jax.jvp(loop, (w,), (1.0,))[1]
    assert_close(jax.jit(loop)(w), wanted)
    assert_close(loop(w), wanted)
    assert_close(jax.jvp(loop, (w,), (1.0,))[1], slope)
    assert_close(jax.grad(loop)(w), slope)
    ws = jnp.asarray([0.7, -0.2])
    assert_close(jax.vmap(jax.grad(loop))(ws)[0], slope)
    assert_close(jax.grad(lambda w: jax.vmap(loop)(w).sum())(ws)[0], slope)
    second = jax.jit(jax.grad(jax.grad(loop)))(w)
    assert_close(jax.jit(jax.jacfwd(jax.grad(loop)))(w), second)
    assert_close(jax.jit(jax.jacfwd(jax.jacfwd(loop)))(w), second)


@pytest.mark.slow
def test_a_loop_that_may_raise():
    def loop(w):
        goes_on = lambda c: c["i"] < 4
        body = lambda c: {"i": c["i"] + 1, "m": advanced(c["m"], XS[0])}
        how = {"max_steps": 5, "throw": True, "return_info": True}
        last, info = loopkit.while_loop(goes_on, body, {"i": 0, "m": model(w)}, **how)
        assert last["m"]["act"] is jnp.tanh
        return last["m"]["w"] + info.steps.astype(float)

    w = jnp.asarray(0.7)
    with jax.disable_jit():
        wanted = loop(w)
    assert_close(jax.jit(loop)(w), wanted)
    assert_close(jax.grad(loop)(w), jax.jvp(loop, (w,), (1.0,))[1])


@pytest.mark.slow
def test_truncated_unbounded_and_ragged_scans():
    step = lambda m, x: (advanced(m, x), (m["w"], m["act"]))
    wanted, (ws, _) = loopkit.scan(step, model(0.7), XS)
    cut, (rows, act) = loopkit.scan(step, model(0.7), XS, truncate=2)
    assert_close((cut["w"], rows), (wanted["w"], ws))
    assert cut["act"] is act is jnp.tanh
    until = lambda m, y: m["act"] is not y[1]
    for segment in (1, 64):
        last, (rows, act) = loopkit.unbounded_scan(
            step, model(0.7), XS, until=lambda m, y: jnp.array(until(m, y)), segment=segment
        )
        assert_close((last["w"], rows), (wanted["w"], ws))
        assert act is jnp.tanh
    last, ys = loopkit.ragged_scan(
        lambda m, x: step(m, x[0]), model(0.7), [(XS, jnp.sin), (XS[:2], jnp.sin)]
    )
    assert last["act"] is jnp.tanh
    assert_close((last["w"][0], ys[0][0], ys[1][0]), (wanted["w"], ws, ws[:2]))


def test_one_function_is_not_taken_for_another():
    """A step is called with models that differ in leaves that are not arrays."""
    step = lambda m, x: ({**m, "w": m["act"](m["w"]) + m["set"].number}, None)
    for act, number in ((jnp.tanh, 1), (jnp.cos, 1), (jnp.cos, 2), (jnp.tanh, 1)):
        m = {"w": 0.5, "act": act, "set": Setting(number)}
        wanted = float(act(0.5)) + number
        assert float(loopkit.scan(step, m, None, 1)[0]["w"]) == pytest.approx(wanted)


def test_the_same_leaves_are_traced_once():
    traced = []

    def step(m, x):
        traced.append(x)
        return advanced(m, x), None

    m = model(0.5)
    for _ in range(3):
        loopkit.scan(step, dict(m), XS)
    assert len(traced) == 1


@pytest.mark.parametrize("change", [jax.grad, jax.vmap, lambda f: f])
def test_programs_are_those_of_the_arrays_alone(change):
    """The program is that of `eqx.partition` and `eqx.combine` around each step, to the letter."""

    def text(scan):
        f = jax.jit(change(lambda w: scan(model(w))["w"]))
        return f.lower(jnp.ones(3) if change is jax.vmap else 0.7).as_text()

    def by_hand(m):
        arrays, rest = eqx.partition(m, eqx.is_array_like)
        step = lambda a, x: (eqx.filter(advanced(eqx.combine(a, rest), x), eqx.is_array_like), None)
        return loopkit.scan(step, arrays, XS)[0]

    assert text(lambda m: loopkit.scan(lambda m, x: (advanced(m, x), None), m, XS)[0]) == text(
        by_hand
    )


def test_equal_leaves_may_take_each_others_place():
    grow = lambda m, _: ({**m, "set": Setting(3), "name": "".join(["ce", "ll"])}, None)
    last, _ = loopkit.scan(grow, model(0.5), None, 2)
    assert last["set"].number == 3


def changing(key, value):
    return lambda: loopkit.scan(lambda m, x: ({**m, key: value}, None), model(0.5), XS)


ARRAY = r"`init\['w'\]`: expected float64\[\], weak_type, got <"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (changing("act", jnp.cos), r"`init\['act'\]`: expected <.*tanh.*>, got <.*cos"),
        (changing("name", "other"), r"`init\['name'\]`: expected 'cell', got 'other'"),
        (changing("set", Setting(4)), r"`init\['set'\]`: expected <.*Setting.*>, got <"),
        (changing("set", 3.0), r"`init\['set'\]`: expected <.*, got float64\[\]"),
        (changing("w", jnp.cos), ARRAY),
        (changing("name", jnp.cos), "Make an array of each leaf that changes[.] Got:\n  `init"),
        (lambda: loopkit.fori_loop(0, 2, lambda i, m: {**m, "act": len}, model(1.0)), r"`init_val"),
        (
            lambda: loopkit.while_loop(lambda m: True, lambda m: {**m, "act": len}, model(1.0)),
            r"while_loop: `body_fun` must return the leaves of `init_val` that are not arrays unch",
        ),
    ],
)
def test_a_step_returns_the_same(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_another_structure_is_said_to_be_one():
    with pytest.raises(TypeError, match="must return a carry of the structure of `init`"):
        loopkit.scan(lambda m, x: ({"w": m["w"]}, None), model(0.5), XS)
    text = r"`init\['act'\]`: expected pytree leaf, got <class 'NoneType'>"
    with pytest.raises(TypeError, match=text):
        loopkit.scan(lambda m, x: ({**m, "act": None}, None), model(0.5), XS)


LIST = TensorArray.empty(3, model(0.5))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"act": jnp.cos},
            r"`element\['act'\]` must be <.*tanh.*>[.] Make the array .*Got: <.*cos.*>",
        ),
        ({"act": 1.0}, r"`element\['act'\]` must be <.*tanh.*>[.] .*Got: float64\[\], weak_type"),
        ({"w": jnp.cos}, r"`element\['w'\]` must be float64\[\][.] .*Got: <.*cos"),
        (
            {"act": None},
            r"`element` must have the structure .*\{'act': \*, .* Got: .*'act': None, ",
        ),
    ],
)
def test_elements_are_of_the_same_leaves(change, text):
    with pytest.raises(TypeError, match=r"loopkit\.TensorArray\.append: " + text):
        LIST.append({**model(0.5), **change})
    body = lambda i, array: array.append({**model(1.0), **change})
    with pytest.raises(TypeError, match=r"loopkit\.TensorArray\.append: `element"):
        loopkit.fori_loop(0, 2, body, LIST)


def test_a_method_is_that_of_its_object():
    class Cell:
        def act(self, x):
            return jnp.tanh(x)

    cell = Cell()
    last, _ = loopkit.scan(
        lambda c, x: ((c[1](c[0] + x), cell.act, ft.partial), None), (0.5, cell.act, ft.partial), XS
    )
    with jax.disable_jit():
        wanted = loopkit.scan(lambda c, x: (jnp.tanh(c + x), None), 0.5, XS)[0]
    assert_close(last[0], wanted)


@pytest.mark.slow
def test_models_of_equinox_train_in_a_scan():
    """Updates agree with a Python loop, and have a gradient in the learning rate."""
    mlp = eqx.nn.MLP(2, 1, 4, 2, activation=jax.nn.tanh, key=jax.random.key(0))
    xs = jax.random.normal(jax.random.key(1), (6, 5, 2), "float64")
    mlp = jax.tree.map(lambda v: v.astype(float) if eqx.is_array(v) else v, mlp)

    def step(model, x, rate):
        loss = lambda m: jnp.mean((jax.vmap(m)(x)[:, 0] - jnp.sin(x.sum(-1))) ** 2)
        value, gradients = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, gradients)), value

    def by_hand(rate):
        model, losses = mlp, []
        for x in xs:
            model, loss = step(model, x, rate)
            losses.append(loss)
        return jnp.stack(losses)

    def scanned(rate, **options):
        last, losses = loopkit.scan(lambda m, x: step(m, x, rate), mlp, xs, **options)
        assert last.activation is mlp.activation
        return losses

    assert_close(jax.jit(scanned)(0.1), by_hand(0.1))
    wanted = jax.jacfwd(by_hand)(0.1)[-1]
    for options in ({}, {"checkpoints": 2}, {"memory": "4 kB"}, {"checkpoints": "all"}):
        slope = jax.jit(jax.grad(lambda rate, o=options: scanned(rate, **o)[-1]))(0.1)
        np.testing.assert_allclose(slope, wanted, rtol=1e-12)


def test_leaves_that_are_no_arrays_are_the_same_in_all_elements():
    element = {"w": XS, "act": jnp.tanh, "name": "cell", "none": None}
    array = TensorArray.empty(4, element).append({**element, "w": 2 * XS}).append(element)
    for number, one in enumerate(array):
        assert (one["act"], one["name"], one["none"]) == (jnp.tanh, "cell", None)
        assert_close(one["w"], (2 - number) * XS)
    joined = array.concat()
    assert (joined["act"], joined["name"]) == (jnp.tanh, "cell")
    assert_close(joined["w"], jnp.concatenate([2 * XS, XS]))
