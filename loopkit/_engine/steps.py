"""Take steps: read a slice of xs, run the body, write a row of ys, and mask stopped lanes."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine import progress
from loopkit._engine.loop import Loop, Operands, parts

LAST_STEP = jnp.iinfo(jnp.int32).max
"""The largest number that a counter of steps can hold."""


class Steps(NamedTuple):
    """The state of a loop between two steps."""

    count: Any
    """The number of steps taken, int32."""
    carry: list
    ys: list
    """Whole arrays, in which the rows of the first `count` steps are written."""
    lane_counts: Any
    """The number of steps taken by each lane, int32[lanes]; None without lanes."""
    bar: progress.StepMeter | None = None
    """The bar, if the loop shows its progress."""

    @property
    def taken(self) -> Any:
        """The number of steps taken, for each lane if there are lanes."""
        return self.count if self.lane_counts is None else self.lane_counts


def row_of(loop: Loop, step: _jax.Whole) -> Any:
    """Return the row of xs and ys that belongs to a step."""
    if not loop.reverse:
        return step
    assert loop.length is not None, "a loop in reverse has a length"
    return loop.length - 1 - step


def read_slices(loop: Loop, operands: Operands, step: _jax.Whole) -> list:
    """Return the slices of xs that belong to a step."""
    return read_rows(operands.xs, row_of(loop, step), loop.x_axes) if operands.xs else []


def read_rows(arrays: Sequence[Any], row: _jax.Whole, axes: Sequence[int] = ()) -> list:
    """Return one row of each array, moved to the device from the memory that holds it."""
    return [
        _jax.placed(
            lax.dynamic_index_in_dim(a, row, axis, keepdims=False, allow_negative_indices=False)
        )
        for a, axis in zip(arrays, axes or [0] * len(arrays), strict=True)
    ]


def write_rows(
    arrays: Sequence[Any], values: Sequence[Any], row: _jax.Whole, axes: Sequence[int] = ()
) -> list:
    return [
        lax.dynamic_update_index_in_dim(
            a, _jax.placed(v, jax.typeof(a)), row, axis, allow_negative_indices=False
        )
        for a, v, axis in zip(arrays, values, axes or [0] * len(arrays), strict=True)
    ]


def select(active: Any, new: Sequence[Any], old: Sequence[Any], leading: int = 0) -> list:
    """Return `new` in the active lanes, `old` in the others; `leading` axes precede the lanes'."""

    def one(new: Any, old: Any) -> Any:
        inner = jnp.ndim(new) - leading - active.ndim
        return jnp.where(active.reshape((1,) * leading + active.shape + (1,) * inner), new, old)

    return [one(n, o) for n, o in zip(new, old, strict=True)]


def hold(
    active: Any, new: Sequence, old: Sequence, is_buffer: Sequence[bool] = (), leading: int = 0
) -> list:
    """Return the carry after a step that only active lanes take, or its cotangents before the step.

    Steps write nothing into the buffers of other lanes. Values beyond `is_buffer` are not buffers.
    """
    selected = select(active, new, old, leading)
    flags = [*is_buffer, *[False] * (len(selected) - len(is_buffer))]
    return [n if has else s for n, s, has in zip(new, selected, flags, strict=True)]


def is_active(loop: Loop, operands: Operands, carry: Sequence[Any]) -> Any:
    """Return the predicate: a scalar, or a value for each lane."""
    assert loop.cond is not None
    return _jax.call_jaxpr(loop.cond)(*operands.cond_consts, *carry)[0]


def goes_on(loop: Loop, operands: Operands, state: Steps, stop: Any | None) -> Any:
    """Return whether enough lanes are active, and fewer than `stop` steps have been taken."""
    if loop.cond is None:
        return state.count < stop
    active = is_active(loop, operands, state.carry)
    if loop.min_active_lanes:
        go = active.sum() > loop.min_active_lanes
    else:
        go = active.any() if loop.lanes else active
    return go if stop is None else go & (state.count < stop)


def one_step(loop: Loop, operands: Operands, state: Steps, go: Any | None = None) -> Steps:
    """Take a step; if `go` is given, it says whether the step counts."""
    if go is not None:
        return _step_if(go, loop, operands, state)
    row = row_of(loop, state.count) if loop.xs_count or state.ys else state.count
    x = read_rows(operands.xs, row, loop.x_axes)
    outs = _jax.call_jaxpr(loop.body)(*operands.consts, *state.carry, *x)
    carry, y = parts(outs, loop.carry_count)
    lane_counts = None
    if loop.lanes:
        active = is_active(loop, operands, state.carry)
        if not loop.masks_itself:
            carry = hold(active, carry, state.carry, loop.is_buffer)
        shown = sum(not out.log for out in loop.ys)
        y[:shown] = select(active, y[:shown], [_jax.zeros(jax.typeof(v)) for v in y[:shown]])
        lane_counts = state.lane_counts + active.astype(jnp.int32)
    ys = write_rows(state.ys, y, row, loop.y_axes) if state.ys else []
    return Steps(state.count + 1, carry, ys, lane_counts, state.bar)


def _step_if(go: Any, loop: Loop, operands: Operands, state: Steps) -> Steps:
    if loop.effects or loop.shows_within:
        return lax.cond(go, lambda s: one_step(loop, operands, s), lambda s: s, state)
    held = state
    if loop.flag is not None:
        # A step that does not count writes nothing into buffers.
        carry = list(state.carry)
        carry[loop.flag] = carry[loop.flag] & go
        held = state._replace(carry=carry)
    new = one_step(loop, operands, held)
    carry = [
        n if is_buffer else jnp.where(go, n, o)
        for n, o, is_buffer in zip(new.carry, state.carry, loop.is_buffer, strict=True)
    ]
    rest = jax.tree.map(
        lambda n, o: jnp.where(go, n, o),
        new._replace(carry=[], bar=None),
        state._replace(carry=[], bar=None),
    )
    return rest._replace(carry=carry, bar=state.bar)


def start(loop: Loop, operands: Operands) -> Steps:
    """Return the initial state. Counters vary over the devices if the predicate does."""
    decides = [] if loop.cond is None else loop.cond.out_avals
    count, carry = _jax.vary_like(jnp.int32(0), decides), first_carry(loop, operands)
    lane_counts = count + _jax.zeros(decides[0]).astype(jnp.int32) if loop.lanes else None
    bar = progress.opened(loop, loop.length, count, operands.flat) if loop.shows_forward else None
    made = _jax.written if loop.cond is None else _jax.zeros_after
    after = _jax.moment(operands.flat) if loop.ys_types else 0
    return Steps(count, carry, [made(t, after) for t in loop.ys_types], lane_counts, bar)


def first_carry(loop: Loop, operands: Operands) -> list:
    return [_jax.vary_like(v, [t]) for v, t in zip(operands.init, loop.carry_types, strict=True)]


def after_run(loop: Loop, steps: Steps, count: _jax.Whole) -> Steps:
    """Return the state with `count` more steps shown on its bar, if it has one."""
    if steps.bar is None:
        return steps
    lanes_done = lambda: (steps.lane_counts < steps.count).sum(dtype=jnp.int32)
    done = lanes_done if loop.lanes else progress.no_lanes
    return steps._replace(bar=progress.after(loop, steps.bar, count, done=done))


def finished(loop: Loop, steps: Steps) -> Steps:
    """Return the state after the last run, with its bar closed."""
    if steps.bar is None:
        return steps
    carry = progress.closed(loop, steps.bar, steps.carry)
    return steps._replace(carry=carry, bar=None)


def advance(loop: Loop, operands: Operands, state: Steps, stop: Any | None) -> Steps:
    """Take steps until the predicate is false, or `stop` steps have been taken in all."""
    if loop.cond is None:
        return take(loop, operands, stop - state.count, state)
    step = lambda s, go=None: (one_step(loop, operands, s[0], go), None)
    return while_it_goes_on(loop, operands, step, (state, None), stop)[0]


def take(loop: Loop, operands: Operands, count: Any, state: Steps) -> Steps:
    """Take exactly `count` steps."""
    step = lambda s: (one_step(loop, operands, s[0]), None)
    return repeat_step(loop, count, step, (state, None))[0]


def repeat_step(loop: Loop, count: Any, step: Callable[[Any], Any], state: Any) -> Any:
    """Run `step(state)` so often. `state` is a pair of `Steps` and saved values."""
    after = lambda s, count: (after_run(loop, s[0], count), s[1])
    return in_runs(loop, count, lambda _, s: step(s), state, after, state[0].bar)


def while_it_goes_on(
    loop: Loop, operands: Operands, step: Callable[..., Any], state: Any, stop: Any | None
) -> Any:
    """Run `step(state, go)` while the loop goes on; `go` says if the step counts (None: yes).

    `state` is a pair of `Steps` and saved values.
    """
    another = lambda s, stop=stop: goes_on(loop, operands, s[0], stop)

    def iteration(s: Any) -> Any:
        s = step(s)
        for _ in range(loop.unroll - 1):
            s = step(s, another(s))
        return s

    if state[0].bar is None:
        return lax.while_loop(another, iteration, state)

    def run(s: Any) -> Any:
        begin = s[0].count
        end = begin + progress.run_length(loop)
        end = end if stop is None else jnp.minimum(end, stop)
        steps, saved = lax.while_loop(ft.partial(another, stop=end), iteration, s)
        return after_run(loop, steps, steps.count - begin), saved

    return lax.while_loop(another, run, state)


def in_runs(
    loop: Loop,
    times: Any,
    body: Callable[[Any, Any], Any],
    state: Any,
    after: Callable[[Any, Any], Any],
    bar: progress.StepMeter | None,
    part: int = 1,
) -> Any:
    """Run as `repeat` does; with a bar, call `after(state, count)` after each run of steps."""
    if bar is None:
        return repeat(times, body, state, loop.unroll, part)
    length = progress.run_length(loop)

    def run(first: _jax.Whole, count: _jax.Whole, s: Any) -> Any:
        return after(repeat(count, lambda k, s: body(first + k, s), s, loop.unroll), count)

    if isinstance(times, int):  # loops of known length are faster
        some = range(min(length, times), min(4 * length, times) + 1)
        length = next((n for n in some if n and not times % n), length)
    if _jax.host_waits.value or (isinstance(times, int) and not times % length):
        whole = quotient(times, length)
        state = repeat(whole, lambda i, s: run(i * length, length, s), state)
        rest = times - whole * length
        return state if isinstance(rest, int) and not rest else run(whole * length, rest, state)
    count = quotient(times + (length - 1), length)
    left = lambda i: jnp.minimum(length, times - i * length)
    return repeat(count, lambda i, s: run(i * length, left(i), s), state)


def repeat(
    times: Any, body: Callable[[Any, Any], Any], state: Any, unroll: int = 1, part: int = 1
) -> Any:
    """Run `body(i, state)` for i in range(times), with `unroll` calls in an iteration.

    `times` may be known or traced. The calls left over run in a loop of their own. If `times` is
    traced and `part` > 1, calls run `part` at a time in loops of known length.
    """
    if part > 1 and not isinstance(times, int):
        whole = quotient(times, part)

        def known(k: _jax.Whole, s: Any) -> Any:
            return repeat(part, lambda j, s: body(k * part + j, s), s, unroll)

        state = repeat(whole, known, state)
        rest = lambda k, s: body(whole * part + k, s)
        return repeat(times - whole * part, rest, state, unroll)
    if (unroll := min(unroll, times) if isinstance(times, int) else unroll) > 1:
        whole = times // unroll

        def several(k: _jax.Whole, s: Any) -> Any:
            for j in range(unroll):
                s = body(k * unroll + j, s)
            return s

        state = repeat(whole, several, state)
        return repeat(times - whole * unroll, lambda k, s: body(whole * unroll + k, s), state)
    if isinstance(times, int) and times == 1:
        return body(jnp.int32(0), state)
    if isinstance(times, int) and times <= 0:
        return state
    zero = _jax.vary_like(jnp.int32(0), [jax.typeof(times)])

    def step(s: tuple) -> tuple:
        k, inner = s
        return k + 1, body(k, inner)

    return lax.while_loop(lambda s: s[0] < times, step, (zero, state))[1]


def quotient(count: _jax.Whole, by: int) -> Any:
    """Return `count // by`. A count is never negative, so a traced one needs no code for signs."""
    return lax.div(count, jnp.int32(by)) if _jax.is_tracer(count) else count // by


def repeat_backwards(times: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """Run `body(i, state)` for i from times - 1 down to 0.

    The loop counts up, because compilers do not infer the length of a long loop that counts down.
    """
    return repeat(times, lambda k, s: body(times - 1 - k, s), state)


def evaluate(loop: Loop, operands: Operands) -> list:
    """Return the results of the loop: the final carry, then the ys."""
    every = loop.cond is None and loop.length != 0
    if every and not loop.shows_forward and not any((*loop.x_axes, *loop.y_axes)):
        return scan(loop, operands)
    state = start(loop, operands)
    if every and state.bar is not None:
        state = take(loop, operands, loop.length, state)
    elif loop.length != 0:
        state = advance(loop, operands, state, loop.length)
    done = finished(loop, state)
    return [*done.carry, *done.ys]


def scan(loop: Loop, operands: Operands, split_transpose: bool = False) -> list:
    """Run a loop of known length, which may be symbolic, with lax.scan."""

    def body(carry: list, x: list) -> tuple[list, list]:
        outs = _jax.call_jaxpr(loop.body)(*operands.consts, *carry, *x)
        new, y = parts(outs, loop.carry_count)
        return new, y

    init, length = first_carry(loop, operands), None if operands.xs else loop.length
    with _jax.scan_as_primitive():
        carry, ys = lax.scan(
            *(body, init, operands.xs, length, loop.reverse),
            unroll=loop.unroll,
            _split_transpose=split_transpose,
        )
    return [*carry, *ys]
