"""The pieces of a step that the two sweeps run, and where they keep values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import or_
from typing import Any

from loopkit import _jax
from loopkit._engine.derivative.deferred_products import Products, put_off
from loopkit._engine.derivative.split import Split
from loopkit._engine.derivative.write_log import Undo
from loopkit._engine.facts.bounds import Counters
from loopkit._engine.facts.write_sites import holds_write
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.passes.unused import Pruned, prune, to_run
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import fixed_point
from loopkit._plans.plan import Plan


@dataclass(frozen=True)
class Reversal:
    """How to reverse a loop in its active leaves: the plan and the pieces of a step."""

    loop: Loop
    """The loop without debug effects, because its steps run a second time."""
    active: Active
    plan: Plan
    split: Split
    saved: tuple[bool, ...]
    """Which carry leaves replaying reads. Checkpoints hold those that are `slotted`."""
    step: _jax.Jaxpr
    """(consts, saved carry, x) -> saved carry"""
    forward: _jax.Jaxpr
    """(consts, saved carry, x) -> saved carry, stored residuals"""
    undo: Undo | None
    """How to restore the buffers that checkpoints leave out."""
    counters: Counters
    """Carry leaves that follow from the step number."""
    unused_init: tuple[bool, ...] = ()
    """Carry leaves whose initial value needs no cotangent; empty if all cotangents are wanted."""
    layout_plan: Plan | None = None
    """The plan for the layout of saved values, if the sweeps follow another plan."""
    whole: Reversal | None = None
    """The reversal of the loop with all its results, if this is of a pruned loop."""

    @property
    def backward(self) -> _jax.Jaxpr:
        """(consts, hoisted, x, stored, cotangents) -> cotangents of the active consts, carry, x

        It is made on first use, because the body may hold parts that cannot be transposed.
        """
        return self.backward_there if _jax.for_accelerators() else self.backward_here

    @cached_property
    def backward_here(self) -> _jax.Jaxpr:
        """The backward half for a CPU, or for any platform."""
        return self._make_backward()

    @cached_property
    def backward_there(self) -> _jax.Jaxpr:
        """The backward half for GPUs and TPUs, without barriers."""
        return self._make_backward() if self.plan.price else self.backward_here

    def _make_backward(self) -> _jax.Jaxpr:
        back = self.split.backward(self.active, self.unused_init or [False] * len(self.saved))
        return back if self.loop.holds_custom_vjp else to_run(back)

    @cached_property
    def reads(self) -> list[bool]:
        """Which operands of the loop the backward sweep reads."""
        loop, again = self.loop, not self.plan.keeps_all
        consts, xs, _ = parts(self.split.reads, loop.const_count, loop.xs_count)
        carry = [by is not None for by in self.counters]
        if again or loop.lanes:
            carry = list(map(or_, carry, self.saved))
        if again:
            used = _jax.used_inputs(self.forward, [True] * len(self.forward.out_avals))
            of_step = parts(used, loop.const_count, sum(self.saved))
            consts, xs = list(map(or_, consts, of_step[0])), list(map(or_, xs, of_step[2]))
        return [*[False] * loop.cond_const_count, *consts, *carry, *xs]

    @cached_property
    def products(self) -> Products | None:
        """The products of the backward half worth deferring to the end of a segment."""
        if self.whole is not None:
            return self.whole.products
        plan = self.plan
        if not plan.summed or self.layout_plan is not None:
            return None
        loop, split = self.loop, self.split
        fixed = loop.const_count + len(split.hoist.out_avals)
        number = iter(range(len(split.stored_types)))
        rows = [None if i is not None else next(number) for i in self.counted_rows]
        if self.plan.store == "carries":
            slotted = [i for i, slot in enumerate(kept(self.slotted, self.saved)) if slot]
            place = {loop.const_count + i: row for row, i in enumerate(slotted)}
            rows = [None if s is None else place.get(s) for s in self.sources]
        found = put_off(self.backward, sum(self.active.consts), fixed, fixed + loop.xs_count, rows)
        return found if any(found.put_off) else None

    @cached_property
    def sources(self) -> list[int | None]:
        """For each stored residual, which input of `forward` it is; None if it is computed."""
        return equations.forwarded(self.forward)[sum(self.saved) :]

    @cached_property
    def undone(self) -> tuple[bool, ...]:
        """Which carry leaves are undone, and so need no slot."""
        return (False,) * len(self.saved) if self.undo is None else self.undo.leaves

    @property
    def log_types(self) -> list[_jax.ShapedArray]:
        """The types of what one step logs for undoing its writes."""
        return [] if self.undo is None else self.undo.log_types

    @cached_property
    def slotted(self) -> list[bool]:
        """Which carry leaves a slot holds."""
        leaves = zip(self.saved, self.undone, self.counters, strict=True)
        return [saved and not undone and by is None for saved, undone, by in leaves]

    @cached_property
    def counted_rows(self) -> list[int | None]:
        """For each residual, the carry leaf of the counter that it equals, or None."""
        first = self.loop.const_count
        counter = {first + i: i for i, by in enumerate(self.counters) if by is not None}
        source = equations.forwarded(self.split.forward)[self.split.results :]
        return [None if s is None else counter.get(s) for s in source]

    def for_waiting_hosts(self) -> Reversal:
        """Return the reversal for a GPU, whose host waits in loops of unknown length."""
        plan = self.plan.on_gpu
        return self if plan == self.plan else replace(self, plan=plan, layout_plan=self.plan)

    def without(self, unused_init: tuple[bool, ...]) -> Reversal:
        """Return the reversal without cotangents of unused initial values."""
        if not any(unused_init):
            return self
        key = ("without", self.plan, self.active, unused_init, self.loop.unroll)
        return self.loop.derived(key, lambda: replace(self, unused_init=unused_init))

    def prune_results(self, wanted: Sequence[bool]) -> Pruned:
        """Return the loop with only the wanted results, which saves the same leaves."""
        assert self.undo is None, "what is displaced is logged by all there is"
        carry, ys, _ = parts(wanted, self.loop.carry_count, self.loop.ys_count)
        read = [False] * len(self.loop.body.in_avals)
        if self.plan.stores_rows:
            stored = [False] * self.split.results + [True] * len(self.split.stored_types)
            read = _jax.used_inputs(self.split.forward, stored)
        return prune(self.loop, [*map(or_, carry, self.saved), *ys], read)

    def pruned(self, pruned: Pruned) -> Reversal:
        """Return the reversal of the pruned loop, for a forward sweep."""
        split, (_, consts, carry, xs) = self.split, self.loop.split(pruned.operands)[0]
        outs = [*pruned.results, *[True] * len(split.stored_types)]
        forward, _ = _jax.dce(split.forward, outs, [*consts, *carry, *xs])
        forward = to_run(forward)
        return replace(
            self,
            loop=pruned.loop,
            split=replace(split, forward=forward, results=sum(pruned.results)),
            saved=tuple(kept(self.saved, carry)),
            counters=tuple(kept(self.counters, carry)),
            whole=self,
        )

    @property
    def slot_types(self) -> list[_jax.ShapedArray]:
        return kept(self.loop.carry_types, self.slotted)

    @cached_property
    def remaking(self) -> _jax.Jaxpr:
        """(consts, saved carry, x) -> stored residuals"""
        wanted = [False] * sum(self.saved) + [True] * len(self.split.stored_types)
        return _jax.dce(self.forward, wanted, [True] * len(self.forward.in_avals))[0]

    @cached_property
    def rereads(self) -> bool:
        """Whether a step's residuals depend on what the step itself writes to buffers.

        One case does not count: residuals that hold the whole buffer, as an inner loop leaves it.
        """
        buffers = kept(self.loop.carry_types, self.undone)
        left = any(_jax.same_type(t, b) for t in self.split.stored_types for b in buffers)
        return not left and holds_write(self.remaking)

    def split_saved(self, saved: Sequence[Any]) -> tuple[list, list]:
        """Split the saved leaves into those that a slot holds and the buffers that are undone."""
        in_slots, undone = kept(self.slotted, self.saved), kept(self.undone, self.saved)
        return kept(saved, in_slots), kept(saved, undone)

    def merge_saved(self, counts: list, slot: Sequence[Any], buffers: Sequence[Any]) -> list:
        """Return the saved leaves before a step; `counts` has the counters."""
        return kept(spread(buffers, self.undone, spread(slot, self.slotted, counts)), self.saved)

    def drop_counters(self, residuals: Sequence[Any]) -> list:
        """Return the stored residuals of a step: all but the counters."""
        return kept(residuals, [i is None for i in self.counted_rows])

    def restore_counters(self, row: Sequence[Any], counts: Sequence[Any]) -> list:
        """Return the residuals of a step from the stored ones and the counters."""
        stored = iter(row)
        return [next(stored) if i is None else counts[i] for i in self.counted_rows]

    @cached_property
    def on_host(self) -> list[bool]:
        """For each array that the forward sweep saves, whether it is in the host's memory."""
        if not self.plan.keeps_all:
            rows = len(self.row_types) if self.plan.keeps_last else 0
            return [self.plan.host] * (sum(self.slotted) + rows)
        types = self.split.stored_types
        offloaded = self.split.offloaded or [False] * len(types)
        return [self.plan.host or f for f in self.drop_counters(offloaded)]

    @property
    def row_types(self) -> list[_jax.ShapedArray]:
        """The types of the rows that one step leaves for its reversal."""
        if self.plan.store == "carries":
            return self.slot_types
        decide = [] if self.loop.cond is None else self.loop.cond.out_avals
        types = self.drop_counters(self.split.stored_types)
        return [_jax.type_like(t, decide) for t in types]  # they vary as the predicate does


def build(
    loop: Loop,
    active: Active,
    plan: Plan,
    saved: tuple[bool, ...],
    split: Split,
    undo: Undo | None,
    counters: Counters,
) -> Reversal:
    quiet = loop.without_debug_effects()
    keep = [True] * loop.const_count + list(saved) + [True] * loop.xs_count
    no_ys = [False] * loop.ys_count
    step, _ = _jax.dce(quiet.body, [*saved, *no_ys], keep)
    again = _again(loop, split, [*saved, *no_ys])
    forward, _ = _jax.dce(again, [True] * len(again.out_avals), keep)
    return Reversal(quiet, active, plan, split, saved, step, forward, undo, counters)


def _again(loop: Loop, split: Split, results: Sequence[bool]) -> _jax.Jaxpr:
    """Return the forward half of a step that runs again: some results, then the stored values."""
    wanted = [*results, *[True] * len(split.stored_types)]
    forward, _ = _jax.dce(split.forward, wanted, [True] * len(split.forward.in_avals))
    silent = equations.without_debug_effects(forward)
    # With a custom rule, the next derivative is that of this code.
    return silent if loop.holds_custom_vjp else to_run(silent)


def saved_leaves(loop: Loop, split: Split) -> tuple[bool, ...]:
    """Return which carry leaves replaying needs: a fixed point of what the residuals read."""

    def carry_read(jaxpr: _jax.Jaxpr, outputs: Sequence[bool]) -> list[bool]:
        return parts(_jax.used_inputs(jaxpr, outputs), loop.const_count, loop.carry_count)[1]

    saved = carry_read(
        _again(loop, split, [False] * split.results), [True] * len(split.stored_types)
    )
    no_ys = [False] * loop.ys_count
    return tuple(fixed_point(saved, lambda flags: [carry_read(loop.body, flags + no_ys)])[0])
