"""Layers of a GPT, compiled for a GPU and a TPU: a budget against a policy of jax.checkpoint."""

import jax
import pytest

from .machines import TARGETS, compiled, compilers, cycles, programs

__all__ = ["compilers"]

gpt, layers = programs.gpt, programs.layers
pytestmark = pytest.mark.accelerators

SIZES = {"batch": 2, "length": 2048, "count": 12, "width": 512, "heads": 8}
FULL = jax.checkpoint_policies.nothing_saveable


def program(target, run):
    case = gpt.layers_of_gpt(**SIZES)
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), layers.arguments(case))
    return compiled(target, layers.gradient(run, case), *types)


@pytest.mark.parametrize("target", TARGETS)
def test_the_default_needs_what_a_policy_that_saves_nothing_needs(target):
    """Values that run again are fused with their readers, as in lax."""
    ours, theirs = program(target, layers.ours()), program(target, layers.by_policy(FULL))
    assert ours.device_bytes <= 1.02 * theirs.device_bytes
    assert ours.text.count(" fusion(") <= 1.05 * theirs.text.count(" fusion(")


def test_a_budget_takes_fewer_cycles_and_bytes_than_a_policy():
    theirs = program("tpu", layers.by_policy(FULL))
    ours = program("tpu", layers.ours(memory="120 MB"))
    assert ours.device_bytes <= 0.85 * theirs.device_bytes
    assert cycles(ours.text, 12) <= 0.9 * cycles(theirs.text, 12)
