"""Show the progress of a running loop, which carries three numbers for the host's bar.

A loop counts its steps at the end of each run of steps. When it has taken as many as the host asked
for, it calls the host, which answers with the next number of steps. So the host hears from a loop
about five times a second, however long a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import nanoseconds
from loopkit._progress import open_bars
from loopkit._progress.progress import ProgressSettings

RUN = 2e6
"""The nanoseconds that a run of steps should take. Ending a run costs a few hundred."""
PARTS = 100
"""The least number of runs of a loop with a known bound, if the bound allows as many."""
WAITING_BYTES = 1 << 16
"""The most bytes of a value that waits for the host. Larger values do not wait."""
RUN_STEPS = 256
"""The most steps in a run of a loop without a bound."""


class StepMeter(NamedTuple):
    """The three numbers that a loop carries for its bar, int32 each."""

    number: Any
    """The bar's number on the host."""
    steps: Any
    """The number of steps taken since the last call to the host."""
    due: Any
    """The number of steps after which to call the host again."""


Done = Callable[[], Any]
no_lanes: Done = lambda: jnp.int32(0)


@dataclass(frozen=True)
class Call:
    """A call to the host."""

    progress: ProgressSettings
    backward: bool
    lanes: int

    @classmethod
    def of(cls, loop: Loop, backward: bool) -> Self:
        assert loop.progress is not None, "it is shown"
        lanes = _jax.volume(loop.lanes) if loop.lanes and not backward else 0
        return cls(loop.progress, backward, lanes)


class Opening(Call):
    def __call__(self, site: object, device: int, *values: int) -> tuple[int, ...]:
        if device:
            return open_bars.SILENT, open_bars.NOT_YET
        total = (
            values[0] * self.progress.weight if values[0] >= 0 and self.progress.weight else None
        )
        given = self.progress, total, self.backward, self.lanes, site
        return open_bars.opened(*given), 1 if self.progress.weight else open_bars.NOT_YET


class Update(Call):
    def __call__(self, site: object, device: int, *values: int) -> tuple[int, ...]:
        number, steps, done = values
        due = open_bars.updated(number, steps * self.progress.weight, done, self.lanes)
        return (max(1, due // max(1, self.progress.weight)),)


class Closing(Call):
    def __call__(self, site: object, device: int, *values: int) -> tuple[int, ...]:
        number, steps, _ = values
        open_bars.updated(number, steps * self.progress.weight)
        open_bars.closed(number, self.progress, self.backward)
        return (0,)


def opened(
    loop: Loop,
    total: _jax.Whole | None,
    like: jax.Array,
    known: Sequence[Any],
    backward: bool = False,
) -> StepMeter:
    """Open a bar for `total` steps (None if unknown), which varies over devices as `like` does.

    The bar opens only when the values in `known` have been computed.
    """
    total = jnp.asarray(-1 if total is None else total, jnp.int32)
    bits = sum(map(_bit, filter(_can_wait, known)), jnp.int32(0))
    number, due = _jax.tell(Opening.of(loop, backward), [total, bits], 2)
    values = number, jnp.int32(0), due
    types = [jax.typeof(like), jax.typeof(number)]
    return StepMeter(*(_jax.vary_like(v, types) for v in values))


def after(
    loop: Loop, bar: StepMeter, count: _jax.Whole, backward: bool = False, done: Done = no_lanes
) -> StepMeter:
    """Add `count` steps to the bar. `done` returns the number of lanes that have stopped."""

    def told(bar: StepMeter) -> StepMeter:
        update = Update.of(loop, backward)
        (due,) = _jax.tell(update, [bar.number, bar.steps, done()], 1)
        return bar._replace(steps=jnp.zeros_like(bar.steps), due=due)

    bar = bar._replace(steps=bar.steps + count)
    if _jax.host_waits.value:  # then the host waits for the predicate anyway
        return told(bar)
    return lax.cond(bar.steps >= bar.due, told, lambda bar: bar, bar)


def closed(loop: Loop, bar: StepMeter, results: Sequence[Any], backward: bool = False) -> list:
    """Close the bar and return the results; small results wait until it is closed."""
    (zero,) = _jax.tell(Closing.of(loop, backward), [*bar], 1)
    held = lambda v: jnp.where(zero == 0, v, jnp.zeros_like(v))
    small = lambda v: _jax.byte_count(jax.typeof(v)) <= WAITING_BYTES  # v may be a Python number
    return [held(v) if _can_wait(v) and small(v) else v for v in results]


def _can_wait(value: jax.Array) -> bool:
    """Return whether a value on the device is non-empty, with a known shape and a NumPy dtype."""
    aval = jax.typeof(value)
    known = all(isinstance(n, int) and n > 0 for n in aval.shape)
    return known and isinstance(aval.dtype, np.dtype) and not _jax.is_on_host(aval)


def _bit(value: jax.Array) -> Any:
    """Return 0 or 1, which depends on a value in a way that no compiler can fold."""
    value = jnp.asarray(value)
    first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    return jnp.logical_not(first).astype(jnp.int32).reshape(())


def run_length(loop: Loop) -> int:
    """Return the number of steps in a run."""

    def find() -> int:
        most = RUN_STEPS if loop.length is None else max(1, loop.length // PARTS)
        if _jax.host_waits.value:
            return most
        holds = any(map(equations.holds_while_loop, loop.jaxprs))
        few = 1 if holds else int(RUN / max(1.0, nanoseconds(loop.body)))
        return max(1, min(few, most))

    return loop.derived(("run", _jax.host_waits.value), find)
