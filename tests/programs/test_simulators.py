"""mjx, jaxley and torax: the programs of the benchmarks, which differentiate whole simulations."""

from typing import Any

import jax
import numpy as np
import pytest

from .against_forward_mode import direction, dot, expected, import_or_skip, of_benchmarks

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


def test_a_tokamak(models):
    import_or_skip("torax")
    assert_gradients_agree(models.tokamak_of_torax())
