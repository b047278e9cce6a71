"""Accelerators, for which loops are planned, and the times of equations on them.

A product of matrices takes as long as its arithmetic, or as moving its operands and results,
whichever is longer. Any other equation passes over its largest array once. Peaks and bandwidths are
those of the makers: NVIDIA's data sheets (dense products), AMD's data sheets, and Google's
https://cloud.google.com/tpu/docs/system-architecture-tpu-vm. A chip of TPU v2, v3 or v7 has two
parts, and each part is a device of JAX.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import lax

from loopkit import _jax
from loopkit._jaxprs import prices

LAUNCH = 2_450.0
"""Nanoseconds to launch a short kernel and run it, on an H200 (docs/accelerators.md). In a CUDA
graph, a kernel takes 1,040."""
TPU_KERNEL = 300.0
"""The fewest nanoseconds that a kernel of a TPU takes: a guess, not a measurement."""
SPEEDUP = 30.0
"""The predicted time of an equation on a CPU, divided by that on an accelerator, if it neither
multiplies matrices nor passes over arrays: a factorisation, a sort.

XLA describes an H100 as 132 cores of 128 units at 1.98 GHz, with 3.35 TB/s. This gives a ratio of
670 for products of matrices. It gives 17 for additions: each takes 0.04 ns on the CPU, and moves 8
bytes on the GPU. The value is nearer to the latter, because such equations seldom fill the GPU.
"""


class Accelerator(NamedTuple):
    """The figures of an accelerator that determine the times of equations."""

    kind: str
    """A part of JAX's `device_kind`."""
    flops: float
    """The operations per nanosecond in products of 16-bit numbers."""
    bandwidth: float
    """The bytes read or written per nanosecond."""
    launch: float = LAUNCH
    """The fewest nanoseconds that a kernel takes."""
    wide: float = 2.0
    """How many times as long products of 32-bit numbers take, at default precision."""
    copies_beside: bool = False
    """Whether copies to the host and back are assumed to cost nothing while steps run. An H200 was
    seen to wait for them; a TPU has not been timed."""

    @property
    def byte(self) -> float:
        """Return the nanoseconds to write a byte and read it again."""
        return 2 / self.bandwidth


def _tpu(kind: str, flops: float, bandwidth: float) -> Accelerator:
    return Accelerator(kind, flops, bandwidth, TPU_KERNEL, 1.0, copies_beside=True)


GPUS = (
    Accelerator("H100 PCIe", 756_000, 2_000),
    Accelerator("H100", 989_000, 3_350),
    Accelerator("GH200", 989_000, 4_000),
    Accelerator("H200", 989_000, 4_800),
    Accelerator("B200", 2_250_000, 8_000),
    Accelerator("A100-SXM4-80GB", 312_000, 2_039),
    Accelerator("A100", 312_000, 1_555),
    Accelerator("A10G", 70_000, 600),
    Accelerator("L40S", 362_000, 864),
    Accelerator("L4", 121_000, 300),
    Accelerator("T4", 65_000, 320, wide=8),
    Accelerator("V100", 125_000, 900, wide=8),
    Accelerator("RTX 4090", 165_000, 1_008),
    Accelerator("MI300X", 1_307_000, 5_300),
    Accelerator("MI250X", 191_500, 1_600, wide=4),
)
TPUS = (
    _tpu("TPU v2", 23_000, 350),
    _tpu("TPU v3", 61_500, 450),
    _tpu("TPU v4", 275_000, 1_200),
    _tpu("TPU v5 lite", 197_000, 819),
    _tpu("TPU v5e", 197_000, 819),
    _tpu("TPU v5", 459_000, 2_765),
    _tpu("TPU v6", 918_000, 1_640),
    _tpu("TPU7x", 1_153_500, 3_690),
)
USUAL = {"gpu": GPUS[1], "cuda": GPUS[1], "rocm": GPUS[1], "tpu": TPUS[3]}
"""The device that stands for all those of a platform that are not in the tables."""
PRODUCTS = frozenset(
    ["dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_dot", "symmetric_product"]
)
PASSES = 6
"""How many times as long a product of 32-bit numbers takes at the highest precision, as on a TPU,
which computes six products of 16-bit numbers."""
LONGEST = 16.0
"""How many times as long a product of 64-bit numbers takes as one of 16-bit numbers."""
SERIAL = 20.0
"""The CPU's price per element from which a primitive does more than pass over its operands."""


def planned_for() -> Accelerator | None:
    """Return the device that the code being traced is for; None if it is a CPU.

    It is that of the current mesh, or else the default device.
    """
    platform, kind = _jax.traced_for()
    found = (d for d in (*GPUS, *TPUS) if d.kind in kind)
    return next(found, USUAL.get(platform)) if platform in USUAL else None


def nanoseconds(eqn: _jax.Equation, device: Accelerator) -> float:
    """Predict the time of an equation that holds no others, on an accelerator."""
    name = eqn.primitive.name
    if name in prices.FREE:
        return 0.0
    if name in prices.OUTSIDE:
        return prices.nanoseconds(eqn)
    reads = [prices.touched(eqn)] if name in prices.TOUCHED else [*eqn.outvars, *eqn.invars]
    sizes = [_jax.byte_count(v.aval) for v in reads if hasattr(v.aval, "dtype")]
    if name in PRODUCTS:
        multiplied = 2 * _slowness(eqn, device) * _multiplications(eqn) / device.flops
        return device.launch + max(multiplied, sum(sizes) / device.bandwidth)
    passing = max(sizes, default=0) / device.bandwidth
    if name in prices.PLAIN:  # fused into a kernel with others
        return passing
    price = prices.PRICES.get(name)
    if name in prices.TOUCHED or (price is not None and price.element < SERIAL):
        return device.launch + passing
    return device.launch + max(passing, prices.nanoseconds(eqn) / SPEEDUP)


def _multiplications(eqn: _jax.Equation) -> int:
    """Return the number of multiplications in a product of matrices or a convolution."""
    left, right, results = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = _jax.volume(left.shape[a] for a in contracted)
    elif eqn.primitive.name == "conv_general_dilated":
        features = _jax.volume([right.shape[eqn.params["dimension_numbers"].rhs_spec[0]]])
        depth = _jax.elements(right) // max(1, features)
    else:
        depth = _jax.volume(left.shape[-1:])
    return depth * _jax.elements(results)


def _slowness(eqn: _jax.Equation, device: Accelerator) -> float:
    """Return how many times as long a product takes as one of 16-bit numbers."""
    dtype, precision = eqn.invars[0].aval.dtype, eqn.params.get("precision")
    exact = lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else [precision])
    parts = 4 if dtype.kind == "c" else 1
    size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    wide = min(device.wide * (PASSES if exact else 1), LONGEST)
    return parts * {1: 0.5, 2: 1.0, 4: wide}.get(size, LONGEST)
