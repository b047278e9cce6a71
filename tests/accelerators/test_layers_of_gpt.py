"""Layers of a GPT, compiled for a GPU and a TPU: a budget against a policy of jax.checkpoint."""

from functools import cache

import jax
import pytest

from loopkit import Plan

from .machines import TARGETS, compiled, compilers, counted, cycles, programs

__all__ = ["compilers"]

gpt, layers = programs.gpt, programs.layers
pytestmark = pytest.mark.accelerators

SIZES = {"batch": 2, "length": 2048, "count": 12, "width": 512, "heads": 8}
FULL = jax.checkpoint_policies.nothing_saveable


def program(target, run):
    case = gpt.layers_of_gpt(**SIZES)
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), layers.arguments(case))
    return compiled(target, layers.gradient(run, case), *types)


@cache
def with_nothing_saved(target):
    return program(target, layers.by_policy(FULL))


@pytest.mark.parametrize("target", TARGETS)
def test_the_default_needs_less_than_a_policy_that_saves_nothing(target):
    """It keeps the sums of a softmax, and no scores."""
    ours, theirs = program(target, layers.ours()), with_nothing_saved(target)
    assert ours.device_bytes <= 0.85 * theirs.device_bytes
    if target == "tpu":
        assert cycles(ours.text, 12) <= 0.9 * cycles(theirs.text, 12)


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_run_again_are_fused_with_their_readers(target):
    """As in lax, if nothing but the carry is kept."""
    every_carry = layers.ours(checkpoints=Plan(SIZES["count"]))
    ours, theirs = program(target, every_carry), with_nothing_saved(target)
    assert ours.device_bytes <= 1.02 * theirs.device_bytes
    assert ours.text.count(" fusion(") <= 1.05 * theirs.text.count(" fusion(")


def test_a_budget_takes_fewer_cycles_and_bytes_than_a_policy():
    theirs = with_nothing_saved("tpu")
    ours = program("tpu", layers.ours(memory="120 MB"))
    assert ours.device_bytes <= 0.85 * theirs.device_bytes
    assert cycles(ours.text, 12) <= 0.9 * cycles(theirs.text, 12)


@pytest.mark.parametrize(("target", "host", "again"), [("tpu", 0.75, 1.1), ("gpu", 0.25, 1.2)])
def test_a_budget_with_the_host_against_a_policy_that_offloads(target, host, again):
    """The bytes of the host lie between two points of the frontier of a layer.

    To multiply a little more takes less time than to copy all that the policy does. A GPU waits for
    copies, so it copies less than a TPU.
    """
    policy = programs.policies_of_maxtext()["minimal_offloaded"]
    case = gpt.layers_of_gpt(**SIZES | {"width": 1024, "heads": 16})
    needed = lambda run: counted(target, layers.gradient(run, case), *layers.arguments(case))
    theirs, products = needed(layers.by_policy(policy))
    budget = {"device": theirs.device_bytes * 3 // 4, "host": theirs.host_bytes}
    ours, more = needed(layers.ours(memory=budget))
    assert more <= again * products
    assert ours.device_bytes <= theirs.device_bytes
    assert ours.host_bytes <= host * theirs.host_bytes
    if target == "tpu":
        assert cycles(ours.text, 12) <= 0.95 * cycles(theirs.text, 12)
