"""Functions that read what has changed are traced anew: cells, lists, attributes, settings.

The very same function is another loop under other settings, and in other lanes.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from test_caching import body, goes_on, row_body, scan
from tolerances import assert_near
from turns import later


def looped(body, x=1.0):
    return float(loopkit.fori_loop(0, 2, lambda _, x: body(x), x))


class Settings:
    rate = 2.0


RATE = 2.0


def remaking(kind):
    """A function that runs a loop over remade functions, and one that changes what they read."""
    match kind:
        case "cell":
            rate = 2.0

            def change():
                nonlocal rate
                rate = 3.0

            return lambda: looped(lambda x: x * rate), change
        case "list":
            rates = [2.0]
            return lambda: looped(lambda x: x * rates[0]), lambda: rates.__setitem__(0, 3.0)
        case "growing list":
            factors = []
            total = lambda x: x * (2.0 + len(factors))
            return lambda: looped(lambda x: total(x)), lambda: factors.append(lambda: None)
        case "dict":
            rates = {"rate": 2.0}
            return lambda: looped(lambda x: x * rates["rate"]), lambda: rates.update(rate=3.0)
        case "attribute":
            settings = types.SimpleNamespace(rate=2.0)
            return lambda: looped(lambda x: x * settings.rate), lambda: setattr(
                settings, "rate", 3.0
            )
        case "attribute of a class":
            return lambda: looped(lambda x: x * Settings.rate), lambda: setattr(
                Settings, "rate", 3.0
            )
        case "attribute of a module":
            module = types.ModuleType("settings")
            module.rate = 2.0
            return lambda: looped(lambda x: x * module.rate), lambda: setattr(module, "rate", 3.0)
        case "global":
            return lambda: looped(lambda x: x * RATE), lambda: globals().update(RATE=3.0)
        case "numpy array":
            rates = np.full(3, 2.0)
            return lambda: looped(lambda x: x * rates[0]), lambda: rates.fill(3.0)
        case "large numpy array":
            rates = np.full(100_000, 2.0)
            return lambda: looped(lambda x: x * rates[-1]), lambda: rates.fill(3.0)
        case "method":
            owner = types.SimpleNamespace(rate=2.0)
            method = types.MethodType(lambda self, x: x * self.rate, owner)
            return lambda: looped(lambda x: method(x)), lambda: setattr(owner, "rate", 3.0)
        case "default":
            scale = lambda x, rate=2.0: x * rate
            change = lambda: setattr(scale, "__defaults__", (3.0,))
            return lambda: looped(lambda x: scale(x)), change
        case "type of a constant":
            constant = [2.0]
            return lambda: looped(lambda x: x * constant[0]), lambda: constant.__setitem__(0, 3)


KINDS = ["cell", "list", "growing list", "dict", "attribute", "attribute of a class"]
KINDS += ["attribute of a module", "global", "numpy array", "large numpy array", "method"]
KINDS += ["default", "type of a constant"]


@pytest.mark.parametrize("kind", KINDS)
def test_remade_functions_see_what_has_changed(kind, monkeypatch):
    monkeypatch.setattr(Settings, "rate", 2.0)
    monkeypatch.setitem(globals(), "RATE", 2.0)
    run, change = remaking(kind)
    assert run() == 4.0
    change()
    assert run() == 9.0


def test_zeros_of_either_sign():
    """Equal numbers that are not the same number."""
    signs = [looped(lambda x, zero=zero: jnp.copysign(x, zero)) for zero in (0.0, -0.0)]
    assert signs == [1.0, -1.0]


@pytest.mark.slow
def test_settings_are_not_mixed_up():
    """Calls of the same functions may differ in bounds, settings and types."""
    run = lambda x, **kwargs: loopkit.while_loop(goes_on, body, (0, x), **kwargs)[0]
    assert [run(0.3), run(0.3, max_steps=2), run(0.3, max_steps=3), run(0.3)] == [4, 2, 3, 4]
    grads = [
        jax.grad(lambda x, c=c: loopkit.while_loop(goes_on, body, (0, x), checkpoints=c)[1])(0.3)
        for c in (1, 2, None, 1)
    ]
    assert_near(grads, [grads[0]] * len(grads))
    assert scan(0.3).dtype == jnp.float64
    assert loopkit.scan(row_body, jnp.float32(0.3), jnp.ones(4, "float32"))[0].dtype == jnp.float32
    forward, backward = (
        loopkit.scan(row_body, 0.3, jnp.arange(4.0), reverse=reverse)[1]
        for reverse in (False, True)
    )
    assert forward.tolist() != backward.tolist()


HELD = {"rate": 2.0}


def test_the_very_same_function_is_pure_as_in_lax():
    """The documented rule: it is traced once, whatever it reads."""

    def body(c, _):
        return c * HELD["rate"], None

    for loops in (lax, loopkit):
        HELD["rate"] = 2.0
        assert loops.scan(body, 1.0, None, 2)[0] == 4.0
    HELD["rate"] = 3.0
    assert lax.scan(body, 1.0, None, 2)[0] == loopkit.scan(body, 1.0, None, 2)[0] == 4.0


@pytest.mark.slow
def test_a_function_that_died_is_not_taken_for_another():
    """Python gives a new function the place of one that is gone."""
    places = set()
    for v in range(30):
        body = eval(f"lambda c, _: (c + {v}, None)")
        places.add(id(body))
        assert loopkit.scan(body, 0.0, None, 2)[0] == 2.0 * v
        del body
    assert len(places) < 30


@pytest.mark.exhaustive
def test_lanes_are_part_of_a_loop():
    """Loops whose equations are the same, and whose constants have other axes."""

    def f(w, x):
        step = lambda c: c * w[0] + w[1]
        return loopkit.while_loop(lambda c: c < x, step, 1.0, max_steps=20)

    w, x = jnp.array([[2.0, 0.5], [3.0, 0.1]]), jnp.array([9.0, 30.0])
    for axes in ((0, 0), (None, 0), (0, None), (0, 0)):
        args = [v if a == 0 else v[1] for v, a in zip((w, x), axes, strict=True)]
        for transform in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
            got = jax.vmap(transform(f), axes)(*args)
            for lane in range(2):
                one = [v[lane] if a == 0 else v for v, a in zip(args, axes, strict=True)]
                jax.tree.map(
                    lambda a, b, lane=lane: np.testing.assert_allclose(a[lane], b),
                    got,
                    transform(f)(*one),
                )


def settled(c, x):
    """The very same function for all settings."""
    c = 0.8 * c + 0.1 * jnp.sin(c) + (0.3 if x is None else x.sum())
    return c, c * jnp.arange(1.0, 3.0)


def is_large(c, _):
    return c > 1.6


def by_hand(c, xs, length, truncate, reverse, until, axis, out):
    ys = [jnp.zeros(2)] * length
    for k, t in enumerate(range(length)[:: -1 if reverse else 1]):
        c = lax.stop_gradient(c) if truncate and k and k % truncate == 0 else c
        c, ys[t] = settled(c, None if xs is None else jnp.take(xs, t, axis))
        last = ys[t]
        if until and until(c, ys[t]):
            break
    return c, last if out is None else jnp.stack(ys, out)


def by_scan(c, xs, length, truncate, reverse, until, axis, out):
    how = {"truncate": truncate, "until": until, "in_axes": axis, "out_axes": out}
    return loopkit.scan(settled, c, xs, length, reverse, **how)


SETTINGS = {
    "length": [12, 16],
    "truncate": [None, 3, 4],
    "reverse": [False, True],
    "until": [None, is_large],
    "axis": [0, 1],
    "out": [0, 1, None],
    "xs": [False, True],
}
EVERY_SETTING = [dict(zip(SETTINGS, v, strict=True)) for v in itertools.product(*SETTINGS.values())]


FEW = {"reverse": False, "until": None, "axis": 0, "out": 0}
SOME = [how for how in EVERY_SETTING if how.items() >= FEW.items()]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SOME, later(EVERY_SETTING[::5])])
def test_the_very_same_function_under_other_settings(settings):
    for how in settings:
        length, has_xs = how["length"], how["xs"]
        rows = jnp.cos(jnp.arange(2.0 * length)).reshape(length, 2)
        xs = None if not has_xs else rows.T if how["axis"] else rows
        found = []
        for loop in (by_scan, by_hand):
            run = lambda c, loop=loop, how=how, xs=xs: loop(c, **{**how, "xs": xs})
            total = lambda c, run=run: sum(jnp.sum(v**2) for v in run(c))
            found.append((*run(jnp.float64(0.2)), jax.grad(total)(0.2)))
        assert_near(*found, what=str(how))
