"""The devices that code is traced for, and how a primitive is lowered for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core
from jax._src.interpreters import mlir

from loopkit._jax.avals import LoweringContext
from loopkit._jax.memory import is_alone

KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)
"""Whether the compiler for CPUs keeps lax.optimization_barrier until it has fused operations."""


def default_device() -> Any:
    """Return the device on which JAX computes by default."""
    default = config.default_device.value
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def traced_for() -> tuple[str, str]:
    """Return the platform and the kind of the device that code is traced for: that of the current
    mesh, or else the default device."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device or default_device()
    return device.platform, device.device_kind


host_waits = jax.make_user_context(False)
"""Whether the host waits in each iteration of a loop of unknown length, as for a GPU."""
_lowered_for = jax.make_user_context(((), False))
"""The platforms that a program is being lowered for, if any, and whether it is for one device."""


def lower_by(
    primitive: core.Primitive,
    evaluate: Callable,
    alone: Callable | None = None,
    platform: str | None = None,
) -> None:
    """Lower a primitive to a function, with the memory that it names; on one device, to `alone`.

    JAX looks for such names in the equations of a program, not in what these are lowered to, and
    drops all of them if it finds none.
    """
    spread, alone = (
        mlir.lower_fun(f, multiple_results=True) for f in (evaluate, alone or evaluate)
    )

    def rule(ctx: LoweringContext, *operands: Any, **params: Any) -> Any:
        ctx.module_context = ctx.module_context.replace(all_default_mem_kind=False)
        platforms = tuple(ctx.platforms or ctx.module_context.platforms)
        waits, one = host_waits.value or platform == "gpu", is_alone(ctx)
        with host_waits(waits), _lowered_for((platforms, one)):
            return (alone if one else spread)(ctx, *operands, **params)

    mlir.register_lowering(primitive, rule, platform=platform)


def for_accelerators() -> bool:
    """Return whether a program is being lowered for GPUs or TPUs alone."""
    return host_waits.value or _leaves_out_cpus()


def _leaves_out_cpus() -> bool:
    platforms, _ = _lowered_for.value
    return bool(platforms) and "cpu" not in platforms


def for_one_cpu() -> bool:
    """Return whether a program is being lowered for a single CPU alone."""
    return _lowered_for.value == (("cpu",), True)


def keeps_barriers() -> bool:
    """Return whether all compilers that a program may be lowered for keep barriers."""
    return KEEPS_BARRIERS or _leaves_out_cpus()


def target_device() -> Any:
    """Return a device of this process of the platform that a program is being lowered for, or None.

    If none is being lowered, return the default device.
    """
    platforms, _ = _lowered_for.value
    if not platforms:
        return default_device()
    for platform in platforms:
        with contextlib.suppress(RuntimeError):  # no such devices here
            return jax.local_devices(backend=platform)[0]
    return None


def device_of(values: Sequence[Any]) -> Any:
    """Return the device on which jax computes with these values outside jit."""
    arrays = (v for v in values if isinstance(v, jax.Array) and not isinstance(v, core.Tracer))
    return next((next(iter(v.devices())) for v in arrays if v.committed), None) or target_device()


def as_there(values: Sequence[Any] = ()) -> Any:
    """Return a context in which to trace a loop outside a lowering, for the device that will
    compute it."""
    return host_waits(host_waits.value or getattr(device_of(values), "platform", "") == "gpu")
