"""Check that there is memory for saved values, and that those on the host come back unchanged.

Compilers have moved buffers between memories wrongly, which silently makes gradients wrong. And a
right gradient does not prove that its checkpoints were on the host. So before the first loop of a
process that keeps checkpoints on the host, loopkit computes a small gradient both ways on the
device, compares the two, and asks the compiler how much of the program is on the host.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.loop import CarryLeaf, Loop
from loopkit._engine.primitives import while_p
from loopkit._plans.plan import Plan

KIND = "pinned_host"
SIZE = 256
"""The number of elements in the carry of the small loop."""
HOST_ADVICE = "Pass `memory` as one number, or a plan with host=False."

_sound: set[Any] = set()
"""Devices on which the gradients were equal."""


def check_host_memory(name: str) -> None:
    """Raise unless checkpoints can be kept on the host. The check runs once for each device.

    It does not run for a program that is lowered for a platform which this machine lacks.
    """
    device = _jax.target_device()
    if device is None or device in _sound:
        return
    check_kinds(name, device)
    _sound.add(device)  # the gradients below run loops that check, too
    try:
        programs = [compiled(device, host) for host in (False, True)]
        check_placed(name, device, programs[1])
        check_same(name, device, programs)
    except BaseException:
        _sound.discard(device)
        raise


def check_kinds(name: str, device: _jax.Device) -> None:
    """Raise unless the device can address memory of the host."""
    kinds = memory_kinds(device)
    if KIND not in kinds:
        problem = "`memory`, or a plan with host=True, can keep checkpoints on the host only if "
        problem += f"the device has memory of the kind {KIND!r}"
        got = f"{device.device_kind} with {', '.join(sorted(kinds))}"
        raise NotImplementedError(errors.message(name, problem, got, HOST_ADVICE))


def memory_kinds(device: _jax.Device) -> set[str]:
    return {memory.kind for memory in device.addressable_memories()}


def compiled(device: _jax.Device, host: bool) -> Any:
    """Compile the gradient of a small loop for a device, perhaps of another machine."""
    place = jax.sharding.SingleDeviceSharding(device)
    gradient = jax.grad(lambda x: _probe(x, host))
    function = jax.jit(gradient, in_shardings=place, out_shardings=place)
    return function.lower(jax.ShapeDtypeStruct((SIZE,), jnp.float32)).compile()


def check_placed(name: str, device: _jax.Device, program: jax.stages.Compiled) -> None:
    """Raise unless the compiler reports that the program has memory on the host.

    A CPU is its own host: there is one memory, and nothing to check.
    """
    if device.platform == "cpu":
        return
    found = getattr(program.memory_analysis(), "host_temp_size_in_bytes", None)
    if not found:
        problem = "the compiler must put checkpoints into the host's memory for `memory`, or for a "
        problem += "plan with host=True"
        got = f"{found} bytes there, by its own account, {_versions(device)}"
        raise RuntimeError(errors.message(name, problem, got, HOST_ADVICE))


def check_same(name: str, device: _jax.Device, programs: list) -> None:
    """Raise if a gradient depends on where its checkpoints are."""
    with jax.ensure_compile_time_eval():
        x = jax.device_put(np.linspace(0.1, 0.9, SIZE, dtype=np.float32), device)
    here, there = (np.asarray(program(x)) for program in programs)
    if not np.allclose(here, there, rtol=1e-4):
        problem = "checkpoints must come back unchanged from the host's memory"
        got = f"gradients that differ by {np.max(np.abs(here - there)):.1e} {_versions(device)}"
        raise RuntimeError(errors.message(name, problem, got, HOST_ADVICE))


def _versions(device: _jax.Device) -> str:
    return f"on {device.device_kind} with jax {jax.__version__}"


def _probe(x: jax.Array, host: bool) -> Any:
    """Run a loop that saves, recomputes and overwrites checkpoints; its slopes are about one."""
    body = _jax.trace_closed(lambda x: [x + 0.02 * jnp.sin(5 * x)], [jax.typeof(x)], "probe")
    plan = Plan(3, segment=2, host=host)
    loop = Loop(None, body, 0, (), (CarryLeaf(),), (), (), 23, checkpoints=plan, name="probe")
    return jnp.sum(while_p.bind(x, loop=loop)[0] ** 2)


def check_room(name: str, steps: int, step_bytes: int) -> None:
    """Raise if all memory of the machine is too small for the residuals of all steps."""
    needed, there = steps * step_bytes, all_memory()
    if there is None or needed <= there:
        return
    raise errors.wrong_value(
        name,
        "checkpoints",
        f'can be "all" only if {steps:,} steps of {step_bytes:,} bytes, {errors.size(needed)} in '
        "all, fit in the memory",
        f"{errors.size(there)} of memory",
        "Lower `max_steps` to the most steps that the loop takes, or replace `checkpoints` by "
        "`memory`, which keeps as much as fits.",
    )


def all_memory() -> int | None:
    """Return the bytes of memory of all devices, used or not; None if they are not known."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit * jax.device_count()
    try:  # a CPU reports no limit: take all memory of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * jax.process_count()
    except (AttributeError, ValueError, OSError):
        return None
