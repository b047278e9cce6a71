"""Functions that read what has changed are traced anew: cells, lists, attributes, settings."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from test_caching import body, goes_on, row_body, scan
from tolerances import assert_near


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
