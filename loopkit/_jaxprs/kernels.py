"""Find which loops XLA for CPUs compiles as one kernel, and how many kernels others launch.

A loop of small steps is one kernel unless a step holds one of a few instructions. Otherwise XLA
launches the kernels of a step one by one. If an array of the loop is large, they run in a pool of
threads, and each waits for the threads.
"""

import math

import jax

from loopkit import _jax
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import factor_bytes
from loopkit._jaxprs.prices import LIBRARY, MEASURES, SCATTERS
from loopkit._jaxprs.products import transposes_to_several_axes

ONE_THREAD = 1 << 16
"""The bytes of an array up to which XLA for CPUs runs operations on it in order, if it runs a loop
operation by operation. If a loop has a larger array, XLA hands them to a pool of threads."""
FEW_ROWS, MANY_ROWS = 16, 128
"""The fewest and the most steps whose rows are copied at a time."""
SUMMED = 16
"""Roughly for how many steps a loop that stores all residuals sums products of rows at once."""
_OTHERS = "fft sort triangular_solve tridiagonal_solve ffi_call io_callback pure_callback"
ALONE = frozenset({*LIBRARY, *SCATTERS, *_OTHERS.split()})
"""Primitives that keep a loop from becoming one kernel."""
ALONE_BACK = ALONE | {"gather"}
"""Primitives that keep the backward loop from it: the transpose of a gather is a scatter."""


def launched(step: _jax.Jaxpr, tangents: _jax.Jaxpr) -> int:
    """Return how many kernels a step launches; 0 if its loop and the backward loop are one each."""
    if not _holds(step, ALONE) and not _holds(tangents, ALONE_BACK):
        return 0
    return sum(e.primitive.name in MEASURES for e in _jax.open_jaxpr(step).eqns)


def lax_takes_longer(body: _jax.Jaxpr, consts: int, length: int | None) -> bool:
    """Return whether the gradient of a lax scan takes longer than that of a loop of loopkit.

    A step of lax writes to large arrays, and may wait for threads to do so. It adds to the gradient
    of each matrix among the first `consts` inputs. In lax, a product that sums over several axes
    moves axes of its operands.
    """
    if length is None or jax.default_backend() != "cpu":
        return False
    if transposes_to_several_axes(body):
        return True
    if summed_at_once(length) and factor_bytes(equations.inlined(body), consts)[1]:
        return True
    if not _holds(body, ALONE_BACK):
        return False
    made = (v.aval for eqn in body.eqns for v in eqn.outvars)
    return length * max(map(_jax.byte_count, made), default=0) > ONE_THREAD


def rows_at_a_time(steps: int, largest: int) -> int:
    """Return for how many steps at a time to stack rows, so that one thread handles the arrays.

    `largest` is the bytes of the largest row. The last array has few rows to spare. The result is 0
    if the arrays of all steps are small, or if those of a few steps are not.
    """
    most = min(ONE_THREAD // max(largest, 1), MANY_ROWS)
    if steps * largest <= ONE_THREAD or most < FEW_ROWS:
        return 0
    lengths = range(max(FEW_ROWS, most // 2), most + 1)
    return min(lengths, key=lambda length: (-steps % length, -length))


def near_divisor(bound: int, segment: int) -> int:
    """Return a divisor of `bound` near `segment`, or `segment` if there is none.

    If all segments have the same length, the compiler knows how many steps each loop takes.
    """
    near = range(max(1, math.ceil(0.7 * segment)), math.floor(1.4 * segment) + 1)
    divisors = [k for k in near if bound % k == 0]
    return min(divisors, key=lambda k: abs(k - segment), default=segment)


def summed_at_once(steps: int) -> int:
    """Return for how many steps at a time a loop that stores all residuals sums products of rows.

    0 if the number does not divide the steps, or if their rows would be many of all.
    """
    length = near_divisor(steps, SUMMED)
    return length if steps >= SUMMED * SUMMED // 2 and not steps % length else 0


def _holds(jaxpr: _jax.Jaxpr, names: frozenset[str]) -> bool:
    return any(e.primitive.name in names and not _at_one(e) for e in equations.all_equations(jaxpr))


def _at_one(eqn: _jax.Equation) -> bool:
    """Return whether an equation reads or writes at one index: XLA makes it a slice."""
    indexed = eqn.primitive.name in ("gather", *SCATTERS)
    return indexed and _jax.volume(eqn.invars[1].aval.shape[:-1]) == 1
