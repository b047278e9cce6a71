"""mjx and jaxley, by the programs of the benchmarks, and torax: whole simulations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .against_forward_mode import (
    assert_agrees,
    direction,
    dot,
    expected,
    import_or_skip,
    of_benchmarks,
)

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore")]  # of theirs, as they run


@pytest.fixture(scope="module")
def models():
    return of_benchmarks("library_models")


def assert_gradients_agree(made: Any) -> None:
    """All ways with the first; and that with forward mode, which it may be already."""
    gradients = {name: jax.jit(f)(made.at) for name, f in (made.own | made.ours).items()}
    first = next(iter(gradients.values()))
    for name, gradient in gradients.items():
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(first), strict=True):
            atol = made.tolerance * np.max(np.abs(b))
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(first))
    if made.loss is not None:
        wanted = expected(made.loss, made.at, 1)["first"]
        np.testing.assert_allclose(dot(first, direction(made.at)), wanted, rtol=1e-9)


@pytest.mark.parametrize("solver", ["Newton", "CG"])
@pytest.mark.parametrize("bodies", ["BALL", "ARM"])
def test_contact_and_joint_limits(models, bodies, solver):
    """20 steps, each of which iterates in while loops: forward mode is the reference."""
    import_or_skip("mujoco.mjx")
    bodies, how = getattr(models, bodies), {"steps": 20, "solver": solver}
    assert_gradients_agree(models.steps_of_mjx(bodies, 4, models.forward, **how))


def test_cells(models):
    """Also in jaxley's own nested scans, with checkpoints of its own around."""
    import_or_skip("jaxley")
    assert_gradients_agree(models.voltage_of_jaxley())


def test_a_tokamak():
    """Few cells and three steps: the programs of a step are large, whatever their arrays are."""
    torax = import_or_skip("torax")
    from torax.examples.basic_config import CONFIG

    sources = {"ei_exchange": {}, "generic_heat": {}, "generic_current": {}}
    config = CONFIG | {
        "geometry": {"geometry_type": "circular", "n_rho": 4},
        "numerics": {"t_final": 2.0, "fixed_dt": 0.5, "adaptive_dt": False},
        "sources": sources,
        "time_step_calculator": {"calculator_type": "fixed"},
    }
    step = torax.experimental.make_step_fn(torax.ToraxConfig.from_dict(config))

    def loss(multiplier):
        changed = {"sources.ei_exchange.Qei_multiplier": multiplier}
        provider = step.runtime_params_provider.update_provider_from_mapping(changed)
        states, _, last = torax.experimental.run_loop_jit(step, 3, provider)
        return jnp.mean(states.core_profiles.T_e.value[last])

    assert_agrees(loss, jnp.asarray(1.0), order=1)
