"""The device on which JAX computes, and the one that code is traced for."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import config


def default_device() -> Any:
    """Return the device on which JAX computes by default."""
    default = config.default_device.value
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def traced_for() -> tuple[str, str]:
    """Return the platform and the kind of the device that code is traced for: that of the current
    mesh, or else the default device."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device or default_device()
    return device.platform, device.device_kind
