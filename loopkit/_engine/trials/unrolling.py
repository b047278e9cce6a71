"""unroll="auto": how many steps to compile into one iteration, by trying.

More steps to an iteration cost less bookkeeping and take longer to compile; which wins depends on
the step and on the device. The step is compiled 1, 2, 4, 8 and 16 times to an iteration and timed
on made-up values, for the value or for the gradient, whichever is wanted. What takes the least
time in all, compilation included, is kept for the process and in the user's cache folder.

For a GPU nothing is timed: what an iteration costs there beside its steps is known beforehand, a
launch for its counter and, where the predicate is evaluated on the device, a wait of the host.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.loop import Active, CarryLeaf, Loop, kept, parts, spread
from loopkit._engine.primitives import while_p
from loopkit._engine.trials import user_cache
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import nanoseconds
from loopkit._plans.waits import LAUNCH, WAIT

COUNTS = 1, 2, 4, 8, 16
"""Steps to an iteration that are tried."""
USES = 1000
"""How often a compiled loop is taken to run."""
STEPS = 1000
"""Steps that a loop is taken to run if nothing says."""
TRIAL = 5e6
"""Nanoseconds, roughly, that a trial runs."""
LARGEST = 1 << 28
"""Bytes of operands beyond which nothing is tried: such steps do not wait for a loop's counter."""
ROUNDS = 7
NOISE = 1.05
"""More steps to an iteration have to be better than fewer by this factor."""

COMPILE = 0.02
"""Seconds to compile an equation for a GPU."""

_chosen: dict[str, int] = {}


class Trial(NamedTuple):
    """Seconds."""

    to_compile: float
    a_step: float


def settled(loop: Loop, active: Active | None = None) -> int:
    """Steps to an iteration: of the loop, or of its gradient in the leaves of `active`."""
    if not loop.auto_unroll:
        return loop.unroll
    if _jax.host_waits.value:
        return loop.derived(("unroll on a GPU", active), lambda: _counted(loop, active))
    find = lambda: _choose(loop.without_debug_effects().unshown(), active)
    return loop.derived(("unroll", active), find)


def _counted(loop: Loop, active: Active | None) -> int:
    """By launches and waits; what holds a step that does not count costs a launch a leaf."""
    steps, asks = _expected_steps(loop), loop.cond is not None
    if (asks and loop.effects) or not _can_be_tried(loop.without_debug_effects()):
        return 1
    equation_count = sum(1 for _ in equations.all_equations(loop.body))
    copies = 1 if active is None else 3  # run, run again, reversed

    def seconds(count: int) -> float:
        held = (1 - 1 / count) * loop.carry_count * LAUNCH if asks else 0
        iteration = (LAUNCH + asks * WAIT) / count
        to_compile = COMPILE * equation_count * copies * count
        return to_compile + USES * steps * 1e-9 * (held + iteration)

    return min((count for count in COUNTS if count <= steps), key=seconds, default=1)


def _choose(loop: Loop, active: Active | None) -> int:
    if not _can_be_tried(loop):
        return 1
    steps = _expected_steps(loop)
    key = _key(loop, active, steps)
    if key not in _chosen:
        found = user_cache.load(f"unroll-{key}")
        if not isinstance(found, dict) or found.get("unroll") not in COUNTS:
            found = _try_all(loop, active, steps)
            user_cache.store(f"unroll-{key}", found)
        _chosen[key] = found["unroll"]
    return _chosen[key]


def _expected_steps(loop: Loop) -> int:
    if loop.length is None:
        return STEPS
    return loop.length if loop.cond is None else min(loop.length, STEPS)


def _can_be_tried(loop: Loop) -> bool:
    """Whether a step can run by itself, on values that mean nothing.

    It can not if it has side effects, speaks with other devices, calls a function of the host, of
    which it would be a call while JAX traces, or holds a loop that may then never end.
    """
    types = [t for j in loop.jaxprs for t in j.in_avals]
    if any(loop.is_buffer):  # made-up values are no places to write to
        return False
    if loop.length == 0 or loop.effects or any(map(_jax.is_spread, types)):
        return False
    if not all(isinstance(n, int) for t in types for n in getattr(t, "shape", ())):
        return False
    trips = _trial_length(loop)
    rows = _jax.byte_count(*loop.x_types, *loop.y_types)
    if trips * rows + _jax.byte_count(*types) > LARGEST:
        return False
    calls = any(map(equations.calls_the_host, loop.jaxprs))
    return not calls and not any(map(equations.holds_while_loop, loop.jaxprs))


def _key(loop: Loop, active: Active | None, steps: int) -> str:
    """What decides the outcome: the step, its types, the device, the versions."""
    device = jax.devices()[0]
    text = f"{loop.body}\n{loop.cond}\n{loop.xs_count} {loop.lanes} {loop.reverse} {active}"
    text += f"\n{steps}\n{_jax.trace_context()}"
    where = f"{device.platform} {device.device_kind} {jax.__version__}"
    return user_cache.digest(re.sub(r" at 0x[0-9a-f]+", "", text), where)


def _try_all(loop: Loop, active: Active | None, steps: int) -> dict[str, Any]:
    """The count of least time for `USES` runs of `steps` steps, and what each count took."""
    costs: dict[int, float] = {}
    least = float("inf")
    for count in (count for count in COUNTS if count <= steps):
        trial = measure(loop, active, count)
        costs[count] = trial.to_compile + USES * steps * trial.a_step
        # The next takes about twice as long to compile: steps cannot save more than all their time.
        least = min(costs.values())
        if 2 * trial.to_compile > least or min(list(costs.values())[-2:]) > NOISE * least:
            break
    best = next(count for count, cost in costs.items() if cost <= NOISE * least)
    return {"unroll": best, "seconds": {str(count): cost for count, cost in costs.items()}}


def measure(loop: Loop, active: Active | None, count: int) -> Trial:
    """Compile and time the loop with `count` steps to an iteration."""
    length = _trial_length(loop)
    function, operands = trial_of(loop, active, count, length)
    with jax.ensure_compile_time_eval():
        values = [jnp.int32(length), *map(_made_up, operands)]
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*values).compile()
    to_compile = time.perf_counter() - begin
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*values))
        seconds.append(time.perf_counter() - begin)
    return Trial(to_compile, min(seconds) / length)


def _trial_length(loop: Loop) -> int:
    most = _expected_steps(loop)
    return min(most, max(2 * COUNTS[-1], min(STEPS, int(TRIAL / max(1.0, nanoseconds(loop.body))))))


def trial_of(
    loop: Loop, active: Active | None, count: int, length: int
) -> tuple[Callable, list[Any]]:
    """`function(n, *operands)` that runs `n` steps, or their gradient; and the operands' types.

    A predicate is evaluated, and has no say.
    """
    consts, carry = loop.const_count, loop.carry_count
    cond, body, counter = None, loop.body, []
    if loop.cond is not None:
        counter = [_jax.ShapedArray(loop.lanes, jnp.dtype("int32"))]  # the last of the carry
        most = _jax.ShapedArray((), jnp.dtype("int32"))

        def goes_on(n: Any, *values: Any) -> list:  # never because of the predicate
            *asking, taken = values
            (asked,) = _jax.call_jaxpr(loop.cond)(*asking)
            return [(taken < n) | (asked & (n < 0))]

        def step(*values: Any) -> list:
            before, (taken,), x = parts(values, consts + carry, 1)
            new, y = parts(_jax.call_jaxpr(loop.body)(*before, *x), carry)
            return [*new, taken + 1, *y]

        read = [most, *loop.cond_types, *loop.carry_types, *counter]
        cond = _jax.trace_closed(goes_on, read, "trial_cond")
        inputs = [*loop.const_types, *loop.carry_types, *counter, *loop.x_types]
        body = _jax.trace_closed(step, inputs, "trial_body")
    trial = loop.replace(
        cond=cond,
        body=body,
        cond_const_count=loop.cond_const_count + len(counter),
        carry=(*loop.carry, *[CarryLeaf()] * len(counter)),
        length=None if loop.length is None else length,
        checkpoints=None,
        unroll=count,
        auto_unroll=False,
    )
    types = [*loop.cond_types, *loop.const_types, *loop.carry_types, *trial.xs_types]

    def value(n: Any, *operands: Any) -> list:
        if loop.cond is None:
            return while_p.bind(*operands, loop=trial)
        own, before, xs = parts(operands, loop.cond_const_count, consts + carry)
        start = jnp.zeros(loop.lanes, jnp.int32)
        results = while_p.bind(n, *own, *before, start, *xs, loop=trial)
        return [*results[:carry], *results[carry + 1 :]]

    if active is None:
        return value, types

    def gradient(n: Any, *operands: Any) -> list:
        own, values = parts(operands, loop.cond_const_count)

        def moved(*moving: Any) -> list:
            results = value(n, *own, *spread(moving, active.inputs, values))
            return kept(results, active.outputs)

        results, pull = jax.vjp(moved, *kept(values, active.inputs))
        return list(pull([jnp.ones_like(r) for r in results]))

    return gradient, types


def _made_up(aval: Any) -> Any:
    if _jax.is_differentiable(aval):
        return jnp.full(aval.shape, 0.5, aval.dtype)
    return _jax.zeros(aval)
