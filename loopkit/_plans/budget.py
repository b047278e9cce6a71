"""Read `checkpoints` and `memory`: how much a loop may keep for its backward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.validate import check_whole
from loopkit._plans.plan import Plan

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Bytes:
    """A budget in bytes."""

    count: int
    loops: int = 1
    """How many loops share it, in equal parts."""
    host: int | None = None
    """A second budget, for checkpoints in the host's memory. None keeps them on the device."""
    saves: Callable[..., Any] | None = None
    """A policy of `jax.checkpoint`, which says what of a step may be kept."""


@dataclass(frozen=True)
class Part(Bytes):
    """One loop's part of the budget of a whole program, in bytes.

    It is planned for a first derivative. A loop that needs more, such as one of a second
    derivative, takes as few bytes as it can.
    """

    number: int | None = 0
    """The number of the loop in its program; 0 before it has one, None once it has its part. Until
    then, it has the default plan."""
    measured: bool = False
    """Whether the budget limits what the compiler reports instead of what loopkit predicts."""


@dataclass(frozen=True)
class Share:
    """A part of what a loop keeps without a budget. It applies only if that is many bytes."""

    part: float = 1.0
    likely: float = 1.0
    """The part of the bound that the plan is made for. Loops that take more steps rerun more."""


SELDOM_REACHED = Share(likely=0.2)
"""The share for a bound found in a predicate that may end the loop earlier."""


@dataclass(frozen=True)
class Policy:
    """Keep, of every step, what a policy of `jax.checkpoint` saves."""

    saves: Callable[..., Any]


Budget = int | str | Bytes | Share | Policy | Plan | None
"""How much a loop may keep for its backward pass, from `checkpoints` and `memory`."""


def stores_every_step(budget: object) -> bool:
    """Return whether the budget keeps something of every step, however many steps there are."""
    return budget == "all" or isinstance(budget, Policy)


def said(budget: object) -> str:
    """Describe, for errors, the `checkpoints` that ask to keep something of every step."""
    policy = policy_of(budget)
    return repr(budget) if policy is None else f"the policy `{_jax.name_of(policy)}`"


def policy_of(budget: object) -> Callable[..., Any] | None:
    """Return the policy that says what of a step may be kept; None if the budget has none."""
    return budget.saves if isinstance(budget, (Bytes, Policy)) else None


def check_budget(function: str, checkpoints: object, memory: object) -> Budget:
    """Check `checkpoints` and `memory`, and return the budget that they give."""
    if callable(checkpoints):
        if memory is None:
            return Policy(checkpoints)
        return replace(_in_bytes(function, memory), saves=checkpoints)
    if memory is not None:
        if checkpoints is not None:
            advice = "Leave one of them out: they are one budget, in bytes and in carries."
            got = f"memory={memory!r} and checkpoints={checkpoints!r}"
            expected = "cannot be given together with `checkpoints`"
            raise errors.wrong_value(function, "memory", expected, got, advice)
        return _in_bytes(function, memory)
    if checkpoints is None or isinstance(checkpoints, (Bytes, Policy, Plan)):
        return checkpoints
    if isinstance(checkpoints, str):
        if checkpoints != "all":
            advice = 'Pass "all" to store what the derivative of every step reads. '
            advice += "Pass a budget in bytes as `memory`."
            expected = 'must be None, an int >= 1, "all", a policy of jax.checkpoint or a Plan'
            got = repr(checkpoints)
            raise errors.wrong_value(function, "checkpoints", expected, got, advice)
        return "all"
    expected = 'None, an int >= 1 (carries to keep), "all", a policy of jax.checkpoint or a Plan'
    return check_whole(function, "checkpoints", checkpoints, 1, expected)


def _in_bytes(function: str, memory: object) -> Bytes:
    if not isinstance(memory, Mapping):
        return Bytes(read_bytes(function, memory))
    if set(memory) != {"device", "host"}:
        got = f"the keys {list(memory)}"
        expected = 'must have the keys "device" and "host" if it is a dict'
        advice = 'Pass memory={"device": "64 MB", "host": "4 GB"} to keep checkpoints on the host.'
        raise errors.wrong_value(function, "memory", expected, got, advice)
    device, host = (read_bytes(function, memory[k]) for k in ("device", "host"))
    return Bytes(device, host=host)


def read_bytes(function: str, value: object) -> int:
    """Return a number of bytes, from an int or a string such as "64 MB" or "1.5 GiB"."""
    expected = 'an int >= 1 (bytes) or a string such as "64 MB" or "1.5 GiB"'
    if not isinstance(value, str):
        return check_whole(function, "memory", value, 1, expected)
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", value)
    count = int(float(found[1]) * UNITS.get(found[2].lower(), 0)) if found else 0
    if count < 1:
        advice = "Write a number and a unit: B, kB, MB, GB, TB, KiB, MiB, GiB or TiB."
        raise errors.wrong_value(function, "memory", f"must be {expected}", repr(value), advice)
    return count


def for_phases(budget: Budget, widths: Sequence[int]) -> list[Budget]:
    """Split the budget of a loop of many lanes among its phases of fewer and fewer lanes.

    Without a budget, each phase keeps the same part of what it would keep alone, so that all phases
    together keep what the loop of all lanes would. With a budget in bytes, each phase takes half of
    what is left; the rest is for moving the lanes. A budget in carries counts carries of all lanes.
    It is split in the same way, but the last phase takes all that is left.
    """
    last = len(widths) - 1
    if isinstance(budget, Bytes):
        return [replace(budget, loops=budget.loops << k + 1) for k in range(last + 1)]
    part = widths[0] / sum(widths)
    if budget is None:
        return [Share(part)] * len(widths)
    if isinstance(budget, Share):  # each phase takes part of the steps
        return [Share(part, likely=budget.likely * part)] * len(widths)
    carries = budget.slots if isinstance(budget, Plan) and not budget.keeps_all else budget
    if not isinstance(carries, int):
        return [budget] * len(widths)
    left, parts = float(carries), []
    for k, width in enumerate(widths):
        of_all = width / widths[0]
        parts.append(max(1, int((left if k == last else left / 2) / of_all)))
        left -= parts[-1] * of_all
    return [replace(budget, slots=n) for n in parts] if isinstance(budget, Plan) else parts
