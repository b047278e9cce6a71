"""Decide how to reverse a loop: the best plan for its step, and the pieces that it runs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from loopkit import _jax
from loopkit._engine.derivative.linearised import Linearised, Variant, has_frontier, linearised
from loopkit._engine.derivative.pieces import Reversal, build, saved_leaves
from loopkit._engine.derivative.split import Split, keep_split, split_step
from loopkit._engine.derivative.write_log import Undo, find_undo
from loopkit._engine.facts.bounds import find_counters
from loopkit._engine.loop import Active, Loop, kept
from loopkit._engine.primitives import forward_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import equation_nanoseconds, factor_bytes, nanoseconds
from loopkit._jaxprs.equations import is_remat
from loopkit._jaxprs.kernels import launched
from loopkit._jaxprs.min_cut import Point
from loopkit._plans.budget import Bytes, Share
from loopkit._plans.costs import POOLED, Row, StepCosts
from loopkit._plans.plan import Plan
from loopkit._plans.planner import REPLAYED, best_plan

KEY = "reversal"
HARDLY_MORE = 1.1
"""A plan that runs only inner loops again may take this many times the bytes of one that runs whole
steps again."""


class NotReversedError(Exception):
    """A loop has no derivative, or a budget is too small for it."""


@contextmanager
def asked() -> Generator[None, None, None]:
    """Turn errors of JAX, loopkit or custom rules into `NotReversedError`.

    Predictions ask for derivatives that may never be taken.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise NotReversedError from error


def reversal(loop: Loop, layout: Active, active: Active | None = None) -> Reversal:
    """Return the reversal of a loop whose forward sweep was laid out for the leaves of `layout`.

    `active` may have fewer leaves. The layout of what the forward sweep saved stays the same.
    """
    base = loop.derived((KEY, layout), lambda: _planned(loop, layout))
    if active is None or active == layout:
        return base
    # Stored residuals are those of the layout; residuals that are made again are for `active`.
    split = base.split
    if not base.plan.stores_rows:
        fewer = split_step(loop, active, base.plan.price, base.split.variant)
        split = fewer if can_replay(loop, fewer, base.saved) else split
    return loop.derived(
        (KEY, layout, active),
        lambda: build(loop, active, base.plan, base.saved, split, base.undo, base.counters),
    )


def decide(loop: Loop, layout: Active, made: Reversal) -> None:
    """Reverse the loop like `made` from now on, so that its lanes save what one lane saves."""
    keep_split(loop, layout, made.plan.price, made.split)
    loop.memory[KEY, layout] = made


def covers(layout: Active, active: Active) -> bool:
    """Return whether what was saved for `layout` is enough to go back for `active`."""
    return all(b or not a for a, b in zip(sum(active, ()), sum(layout, ()), strict=True))


def can_replay(loop: Loop, split: Split, saved: Sequence[bool]) -> bool:
    """Return whether the residuals of a split can be made from the saved carry leaves."""
    needed = saved_leaves(loop.without_debug_effects(), split)
    return all(s or not n for s, n in zip(saved, needed, strict=True))


def _planned(loop: Loop, active: Active) -> Reversal:
    found = _of_split(loop, active)
    if isinstance(loop.checkpoints, Bytes) and (hidden := remat_nanoseconds(loop)):
        opened, steps = _of_split(loop, active, "opened"), loop.length or 1
        gained = found.plan.nanoseconds(steps) - opened.plan.nanoseconds(steps)
        keeps_rows = opened.plan.keeps_all or opened.plan.store == "residuals"
        if keeps_rows and gained + steps * hidden > 0:
            return opened
    if not found.split.holds_wide or found.plan.keeps_all:
        return found
    with suppress(ValueError):  # the budget may be too small
        kept_whole = _of_split(loop, active, "inner loops again")
        room = max(REPLAYED, HARDLY_MORE * found.plan.peak_bytes)
        if kept_whole.plan.keeps_all and kept_whole.plan.peak_bytes <= room:
            return kept_whole  # only the inner loops run again
    return found


def remat_nanoseconds(loop: Loop) -> float:
    """Predict how long a step takes to run parts under `jax.checkpoint` again."""
    eqns = filter(is_remat, _jax.open_jaxpr(loop.body).eqns)
    return sum(equation_nanoseconds(e, loop.device) for e in eqns)


def step_costs(loop: Loop, active: Active) -> tuple[StepCosts, ...]:
    """Return the costs of a step with writes undone, if they can be, and with buffers saved."""
    return _unplanned(loop, active, "as it is")[2]


def _unplanned(
    loop: Loop, active: Active, variant: Variant
) -> tuple[Reversal, Undo | None, tuple[StepCosts, ...]]:
    """Return the reversal without a plan, how to undo writes, and the costs of a step."""
    split, whole = split_step(loop, active, variant=variant), linearised(loop, active, variant)
    saved = saved_leaves(loop.without_debug_effects(), split)
    quiet = build(loop, active, Plan(1), saved, split, None, find_counters(loop))
    step = _with_smaller_rows(_step_of(quiet, whole), whole)
    undo, steps = find_undo(loop, saved), (step,)
    if undo is not None:
        buffers = _jax.byte_count(*kept(loop.carry_types, undo.leaves))
        log = _jax.byte_count(*undo.log_types)
        left = step.carry_bytes - buffers
        logging = step._replace(
            carry_bytes=left, buffer_bytes=buffers, log_bytes=log, smaller_rows=()
        )
        steps = (logging, step)
    return quiet, undo, steps


def _of_split(loop: Loop, active: Active, variant: Variant = "as it is") -> Reversal:
    quiet, undo, steps = _unplanned(loop, active, variant)
    checkpoints, unasked = loop.checkpoints, isinstance(loop.checkpoints, (Share, type(None)))
    if loop.has_impure_callback and unasked and loop.length is not None:
        checkpoints = "all"
    plan = best_plan(checkpoints, loop.length, loop.cond is None, steps, loop.name)
    if not plan.keeps_all:
        loop.check_repeats()
    undo = None if plan.keeps_all or not plan.step.buffer_bytes else undo
    if plan.strategy == "every carry":
        plan = replace(plan, slots=plan.segment * (plan.segments or 0))  # whole segments
    if plan.price:
        split = split_step(loop, active, plan.price, variant)
        saved = saved_leaves(loop.without_debug_effects(), split)
        quiet = build(loop, active, plan, saved, split, None, quiet.counters)
    return replace(quiet, plan=plan, undo=undo)


def _with_smaller_rows(step: StepCosts, whole: Linearised) -> StepCosts:
    """Add the ways to store less of a step, if it pays to choose."""
    if not has_frontier(whole.loop, step.residual_bytes, step.run):
        return step
    free = {v for v, is_free in zip(whole.carry, whole.residuals.free, strict=True) if is_free}

    def row(point: Point) -> Row:
        stored = [v for v in point.stored if v not in free]
        size = _jax.byte_count(*(v.aval for v in stored))
        return Row(point.price, size, len(stored), point.nanoseconds)

    return step._replace(smaller_rows=tuple(map(row, whole.residuals.choices[1:])))


def _step_of(quiet: Reversal, whole: Linearised) -> StepCosts:
    """Return the costs of a step, for planning."""
    loop, split = quiet.loop, quiet.split
    factors = (0, 0) if loop.lanes else factor_bytes(quiet.forward, loop.const_count)
    stored = quiet.drop_counters(split.stored_types)
    return StepCosts(
        _jax.byte_count(*quiet.slot_types),
        _jax.byte_count(*stored),
        nanoseconds(quiet.step, loop.device),
        nanoseconds(quiet.forward, loop.device),
        nanoseconds(quiet.remaking, loop.device),
        *factors,
        carry_arrays=len(quiet.slot_types),
        residual_arrays=len(stored),
        holds_loops=split.variant == "inner loops again"
        or any(e.primitive is forward_p for e in equations.all_equations(split.forward)),
        slice_bytes=_jax.byte_count(*loop.x_types, *loop.y_types),
        largest_carry=max(map(_jax.byte_count, quiet.slot_types), default=0),
        largest_residual=max(map(_jax.byte_count, stored), default=0),
        pooled=0.0 if loop.device else POOLED * launched(quiet.forward, whole.tangents),
        device=loop.device,
        offloaded_bytes=_jax.byte_count(
            *kept(split.stored_types, split.offloaded or [False] * len(split.stored_types))
        ),
    )
