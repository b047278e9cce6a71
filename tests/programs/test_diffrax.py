"""diffrax: solves that adapt their steps, solve equations in each, draw noise, stop at events."""

import jax
import jax.numpy as jnp
import pytest

from .against_forward_mode import assert_agrees, import_or_skip

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

END = 6.0


def field(t, y, rate):
    hares, lynxes = y
    return jnp.stack([hares * (rate[0] - lynxes), lynxes * (rate[1] * hares - 0.8)])


def stiff(t, y, rate):
    made, lost = -rate[0] * y[0] + 40.0 * y[1] * y[2], 300.0 * rate[1] * y[1] ** 2
    return jnp.stack([made, -made - lost, lost])


def solved(rate, **how):
    diffrax = import_or_skip("diffrax")
    settings = {
        "terms": diffrax.ODETerm(field),
        "solver": diffrax.Tsit5(),
        "t0": 0.0,
        "t1": END,
        "dt0": 0.1,
        "y0": jnp.array([1.2, 0.7]),
        "stepsize_controller": diffrax.PIDController(rtol=1e-6, atol=1e-6),
        "max_steps": 256,
    }
    return diffrax.diffeqsolve(args=rate, adjoint=diffrax.ForwardMode(), **(settings | how))


def adaptive(rate):
    return jnp.sum(solved(rate).ys ** 2)


def at_times(rate):
    diffrax = import_or_skip("diffrax")
    times = diffrax.SaveAt(ts=jnp.linspace(0.5, END, 20))
    return jnp.mean(solved(rate, saveat=times).ys ** 2)


def dense(rate):
    diffrax = import_or_skip("diffrax")
    found = solved(rate, saveat=diffrax.SaveAt(dense=True))
    return jnp.sum(jax.vmap(found.evaluate)(jnp.linspace(0.3, END, 9)) ** 2)


def implicit(rate):
    """Newton's method in every stage of every step."""
    diffrax = import_or_skip("diffrax")
    how = {"terms": diffrax.ODETerm(stiff), "solver": diffrax.Kvaerno3(), "t1": 2.0, "dt0": 1e-3}
    return jnp.sum(solved(rate, y0=jnp.array([1.0, 0.1, 0.0]), **how).ys ** 2)


def noisy(rate):
    """The noise is drawn by bisection, in a loop of its own."""
    diffrax = import_or_skip("diffrax")
    path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (2,), jax.random.key(0))
    spread = lambda t, y, rate: jnp.diag(0.1 * rate[1] * y)
    terms = diffrax.MultiTerm(diffrax.ODETerm(field), diffrax.ControlTerm(spread, path))
    steps = {"stepsize_controller": diffrax.ConstantStepSize(), "t1": 1.0, "dt0": 0.05}
    return jnp.sum(solved(rate, terms=terms, solver=diffrax.Heun(), **steps).ys ** 2)


def until_an_event(rate):
    """The time at which there are as many lynxes as hares, found by a root finder."""
    diffrax, optimistix = import_or_skip("diffrax"), import_or_skip("optimistix")
    crossing = lambda t, y, args, **_: y[0] - y[1]
    event = diffrax.Event(crossing, optimistix.Newton(1e-9, 1e-9))
    found = solved(rate, event=event)
    return found.ts[-1] ** 2 + jnp.sum(found.ys[-1] ** 2)


ALL = {"checkpoints": "all"}
BOUNDED = {"max_steps": 256}  # a loop in each step has no bound of its own
EVERY_STEP = {
    adaptive: ALL,
    at_times: ALL,
    dense: ALL | BOUNDED,
    implicit: ALL,
    noisy: ALL | BOUNDED,
    until_an_event: ALL | BOUNDED,
}


@pytest.mark.parametrize("every_step", [False, True], ids=["default", "all"])
@pytest.mark.parametrize("solve", EVERY_STEP, ids=lambda solve: solve.__name__)
def test_derivatives(solve, every_step):
    how = EVERY_STEP[solve] if every_step else {}
    assert_agrees(solve, jnp.array([1.1, 0.9]), **how)
