"""What may be kept for the backward pass, as users say it: `checkpoints` or `memory`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loopkit._arguments import errors
from loopkit._arguments.validate import check_whole
from loopkit._plans.plan import Budget, Bytes, Plan, Share

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def check_budget(function: str, checkpoints: object, memory: object) -> Budget:
    """What the planner is to work with."""
    if memory is not None:
        if checkpoints is not None:
            advice = "They are one budget, in bytes and in carries: leave one of them out."
            got = f"memory={memory!r} and checkpoints={checkpoints!r}"
            expected = "cannot be given together with `checkpoints`"
            raise errors.wrong_value(function, "memory", expected, got, advice)
        if not isinstance(memory, Mapping):
            return Bytes(read_bytes(function, memory))
        if set(memory) != {"device", "host"}:
            got = f"the keys {list(memory)}"
            expected = 'must have the keys "device" and "host" if it is a dict'
            advice = (
                'Checkpoints are then kept on the host: memory={"device": "64 MB", "host": "4 GB"}.'
            )
            raise errors.wrong_value(function, "memory", expected, got, advice)
        device, host = (read_bytes(function, memory[k]) for k in ("device", "host"))
        return Bytes(device, host=host)
    if checkpoints is None or isinstance(checkpoints, (Bytes, Plan)):
        return checkpoints
    if isinstance(checkpoints, str):
        if checkpoints != "all":
            advice = (
                'The only string is "all", which stores what every step\'s derivative reads. '
                "A budget in bytes is `memory`."
            )
            expected = 'must be None, an int >= 1, "all" or a Plan'
            got = repr(checkpoints)
            raise errors.wrong_value(function, "checkpoints", expected, got, advice)
        return "all"
    expected = 'None, an int >= 1 (carries to keep), "all" or a Plan'
    return check_whole(function, "checkpoints", checkpoints, 1, expected)


def read_bytes(function: str, value: object) -> int:
    """Bytes, from an int or a string such as "64 MB" or "1.5 GiB"."""
    expected = 'an int >= 1 (bytes) or a string such as "64 MB" or "1.5 GiB"'
    if not isinstance(value, str):
        return check_whole(function, "memory", value, 1, expected)
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", value)
    count = int(float(found[1]) * UNITS.get(found[2].lower(), 0)) if found else 0
    if count < 1:
        advice = "Units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB."
        raise errors.wrong_value(function, "memory", f"must be {expected}", repr(value), advice)
    return count


def for_phases(budget: Budget, widths: Sequence[int]) -> list[Budget]:
    """A budget for a loop of many lanes, in parts for phases of fewer and fewer.

    Without one, all have as much as the loop of all lanes would, and each the same part of what it
    would take alone. Of a budget each takes half of what is left; what the last one leaves is for
    the lanes that are moved. A carry is one of all lanes, and of carries the last phase takes all.
    """
    last = len(widths) - 1
    if isinstance(budget, Bytes):
        return [replace(budget, loops=budget.loops << k + 1) for k in range(last + 1)]
    part = widths[0] / sum(widths)
    if budget is None:
        return [Share(part)] * len(widths)
    if isinstance(budget, Share):  # each takes part of the steps
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
