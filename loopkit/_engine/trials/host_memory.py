"""Checkpoints in the host's memory: does a device have it, and do they come back as they were?

Compilers have moved buffers between memories wrongly, and a wrong gradient says nothing. So before
the first loop of a process that keeps its checkpoints on the host, a small gradient is computed
both ways on the device and compared.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._engine.loop import CarryLeaf, Loop
from loopkit._engine.primitives import while_p
from loopkit._plans.plan import Plan

KIND = "pinned_host"

_sound: set[Any] = set()
"""Devices on which gradients have come out right."""


def check_host_memory(name: str) -> None:
    """Raise unless the device has memory of the host."""
    device = jax.devices()[0]
    kinds = memory_kinds(device)
    if KIND not in kinds:
        raise NotImplementedError(
            f"loopkit.{name}: checkpoints can be kept on the host only on a device that has memory "
            f"of the kind {KIND!r}, got {device.device_kind} with {', '.join(sorted(kinds))}. "
            "Give `memory` as one number, or a plan with host=False."
        )


def memory_kinds(device: Any) -> set[str]:
    return {memory.kind for memory in device.addressable_memories()}


def check_gradients(name: str) -> None:
    """Raise if a gradient depends on where its checkpoints are. Looks once for each device."""
    device = jax.devices()[0]
    if device in _sound:
        return
    _sound.add(device)  # the gradients below are of loops that come here too
    try:
        with jax.ensure_compile_time_eval():
            x = jnp.linspace(0.1, 0.9, 256, dtype=jnp.float32)
        found = []
        for host in (False, True):
            gradient = jax.jit(jax.grad(lambda x, host=host: _probe(x, host)))
            found.append(np.asarray(gradient.lower(x).compile()(x)))
        here, there = found
        if not np.allclose(here, there, rtol=1e-4):
            raise RuntimeError(
                f"loopkit.{name}: checkpoints in the host's memory must come back as they were, "
                f"got gradients that differ by {np.max(np.abs(here - there)):.1e} on "
                f"{device.device_kind} with jax {jax.__version__}. Give `memory` as one number, or "
                "a plan with host=False."
            )
    except BaseException:
        _sound.discard(device)
        raise


def _probe(x: Any, host: bool) -> Any:
    """A loop that saves, recomputes and overwrites checkpoints."""
    body = _jax.trace_closed(lambda x: [x + 0.3 * jnp.sin(5 * x)], [jax.typeof(x)], "probe")
    plan = Plan(3, segment=2, host=host)
    loop = Loop(None, body, 0, (), (CarryLeaf(),), (), (), 23, checkpoints=plan, name="probe")
    return jnp.sum(while_p.bind(x, loop=loop)[0] ** 2)
