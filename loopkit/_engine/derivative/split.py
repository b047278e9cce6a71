"""The derivative of one step, split into a forward half and a backward half.

The linearised step is cut at its residuals, the values that the backward half reads, or at values
from which these follow (`min_cut.py`). Values that depend on constants alone are computed once,
before the sweep ("hoisted"). Slices of xs are read again. The rest is stored. Slices of constants
are computed once, too, if the forward half would copy them (`cut_ahead`).

    hoist(consts)                                -> hoisted
    forward(consts, carry, x)                    -> carry, y, stored
    backward(consts, hoisted, x, stored, so far, cts)
                                                 -> cotangents of the active consts, carry, x

Cotangents of the constants are added to those of the steps reversed so far, in place if a step
reads slices of a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.linearised import Linearised, Variant, linearised
from loopkit._engine.facts.write_sites import with_fresh_writes, writes_once
from loopkit._engine.lanes.batched_loop import in_row, places_at
from loopkit._engine.loop import Active, Const, Loop, Operands, kept, parts
from loopkit._jaxprs import equations
from loopkit._jaxprs.min_cut import Cut, Residuals
from loopkit._jaxprs.slice_cotangents import passed_on

SAME_ORDER = frozenset(("squeeze", "reshape"))
WHOLE = frozenset(("dot_general", "conv_general_dilated", "transpose"))
"""Primitives that read whole arrays. Others are fused with the slices that they read."""


@dataclass(frozen=True)
class Split:
    """The two halves of a step's derivative, as the module describes them."""

    hoist: _jax.Jaxpr
    forward: _jax.Jaxpr
    results: int
    """The number of outputs of `forward` that are carry or y."""
    backward: Callable[[Active, Sequence[bool]], _jax.Jaxpr]
    """A function that makes the backward half for the leaves that cotangents flow through.

    Its second argument marks the carry leaves whose initial value needs no cotangent.
    """
    uncut_bytes: int
    """The bytes of all residuals of a step of one lane, as jax.lax.scan stores them."""
    reads: tuple[bool, ...]
    """Which constants, and after them which xs, the backward half reads."""
    offloaded: tuple[bool, ...] = ()
    """Which stored residuals are kept in the host's memory; empty if none are."""
    holds_wide: bool = False
    """Whether a step has inner loops that could run again instead of storing their residuals."""
    variant: Variant = "as it is"
    """How the body was linearised."""
    stored_batched: tuple[bool, ...] = ()
    """Which stored residuals have the new axis, if `batch_split` made the split."""

    @property
    def stored_types(self) -> list[_jax.ShapedArray]:
        return list(self.forward.out_avals[self.results :])


def split_step(
    loop: Loop, active: Active, price: float = 0.0, variant: Variant = "as it is"
) -> Split:
    """Return the halves of the derivative, cut in the best way for a price per byte."""
    whole = linearised(loop, active, variant)
    make = lambda: replace(_cut(whole, price), variant=variant)
    return loop.derived_of_step(_key(active, price, variant), make)


def keep_split(loop: Loop, active: Active, price: float, split: Split) -> None:
    """Use this split of the loop's step from now on."""
    for each in {price, 0.0}:
        loop.step_memory[_key(active, each, "as it is")] = split


def _key(active: Active, price: float, variant: Variant) -> tuple:
    return "split", active, price, variant


def primal_half(loop: Loop, active: Active) -> Loop:
    """Return the loop whose steps are the forward half of the step's derivative.

    A custom rule serves one derivative. The next derivative is that of the rule's own code.
    """
    holds = lambda: loop.holds_custom_vjp or equations.holds_custom_jvp(loop.body)
    if not loop.derived_of_step("holds rules", holds):
        return loop

    def make() -> Loop:
        forward, results = split_step(loop, active).forward, len(loop.body.out_avals)
        wanted = [i < results for i in range(len(forward.out_avals))]
        body, _ = _jax.dce(forward, wanted, [True] * len(forward.in_avals))
        same = not loop.holds_custom_vjp and _have_same_rules(loop.body, body)
        return loop if same else loop.replace(body=body)

    return loop.derived(("primal half", active), make)


def _have_same_rules(body: _jax.Jaxpr, half: _jax.Jaxpr) -> bool:
    """Return whether the forward half of a step surely calls the functions with rules of the step.

    A rule may compute its result by the function itself, as that of `jax.nn.relu` does, or by code
    that has another derivative.
    """
    rules = []
    for eqn in equations.all_equations(body):
        if "loop" in eqn.params or eqn.primitive.name in ("scan", "while"):
            return False
        if _jax.has_custom_jvp(eqn):
            rules.append(_jax.jvp_rule(eqn))
    again = [_jax.jvp_rule(e) for e in equations.all_equations(half) if _jax.has_custom_jvp(e)]
    return None not in rules and rules == again


def _cut(whole: Linearised, price: float) -> Split:
    loop, active, tangents = whole.loop, whole.active, whole.tangents
    body, n, c = loop.body, len(loop.body.out_avals), loop.const_count
    in_types, slices = list(body.in_avals), loop.const_count + loop.carry_count
    cut = whole.residuals.cut(whole.residuals.at(price))
    j = whole.residuals.step
    inputs, results = list(j.invars), j.outvars[:n]
    every = [True] * len(inputs)
    forward = _jax.with_outputs(whole.residuals.jaxpr, [*results, *cut.stored], every)
    # Hoisted values depend neither on the carry nor on slices or effects.
    silent = j.replace(eqns=[eqn for eqn in j.eqns if not eqn.effects])
    hoist = _jax.with_outputs(silent, cut.hoisted, [True] * c + [False] * (len(inputs) - c))

    def make_backward(live: Active, unused_init: Sequence[bool]) -> _jax.Jaxpr:
        def backward(*values: jax.Array) -> list:
            given, so_far, cts = parts(values, len(known), sum(live.consts))
            there = dict(zip(known, given, strict=True))
            residuals = _behind_a_barrier(whole.residuals, cut, there)
            transpose = jax.linear_transpose(
                lambda *moving: passed_on(linear, residuals, moving, sum(live.consts)), *moving
            )
            return list(transpose([*so_far, *cts]))

        # Tangents of other inputs are linear, too: a loop in which they are known could not run.
        linear, moving = _linear_part(tangents, active, live)
        before = len(linear.in_avals) - len(moving) + sum(live.consts)
        numbers = enumerate(i for i, has in enumerate(live.carry) if has)
        once = [(before + k, k) for k, i in numbers if unused_init[i] and writes_once(loop, i)]
        linear = with_fresh_writes(linear, once)
        known = [*inputs[:c], *cut.hoisted, *inputs[slices:], *cut.stored]
        types = [
            *in_types[:c],
            *(v.aval for v in cut.hoisted),
            *loop.x_types,
            *(v.aval for v in cut.stored),
            *(t.to_tangent_aval() for t in kept(loop.const_types, live.consts)),
            *(t.to_tangent_aval() for t in kept(body.out_avals, live.outputs)),
        ]
        back = _jax.trace_closed(backward, types, "loop_step_transpose")
        asked = [k < sum(live.inputs) for k in range(len(moving))]
        return back if all(asked) else _jax.dce(back, asked, [True] * len(types))[0]

    hoisting = _jax.used_inputs(hoist, [True] * len(cut.hoisted))
    given = [v in cut.given for v in (*inputs[:c], *inputs[slices:])]
    reads = (*(a or b for a, b in zip(given, hoisting, strict=False)), *given[c:])
    offloaded = tuple(cut.offloaded) if any(cut.offloaded) else ()
    return Split(hoist, forward, n, make_backward, cut.uncut, reads, offloaded, whole.holds_wide)


def _behind_a_barrier(residuals: Residuals, cut: Cut, values: dict) -> list:
    """Return all residuals; on a CPU, those that take time to make again are behind a barrier.

    Without it, XLA for CPUs makes them again in each kernel that reads them, or holds more at once.
    With it, XLA for GPUs and TPUs writes out what it would otherwise compute where it is read.
    """
    if _jax.for_accelerators():
        return cut.remake(values)
    least = residuals.cut(residuals.least)
    made = [v for v in least.stored if v not in values]
    found = equations.run(cut.again, dict(values), made)
    return least.remake(values | dict(zip(made, _jax.barrier(found), strict=True)))


def _linear_part(tangents: _jax.Jaxpr, active: Active, live: Active) -> tuple[_jax.Jaxpr, list]:
    """Return (residuals, tangents of inputs) -> tangents of live outputs, and the inputs' types.

    The live inputs come first. Equations that only reach other outputs are left out, because some
    may not be transposable.
    """
    j, flows = _jax.open_jaxpr(tangents), kept(live.inputs, active.inputs)
    residuals, moving = parts(j.invars, len(j.invars) - len(flows))
    moving = [*kept(moving, flows), *kept(moving, [not f for f in flows])]
    outs = kept(j.outvars, kept(live.outputs, active.outputs))
    info = j.debug_info.with_unknown_names()
    linear = j.replace(invars=[*residuals, *moving], debug_info=info)
    return _jax.with_outputs(linear, outs, [True] * len(j.invars)), [v.aval for v in moving]


def batch_split(
    split: Split,
    loop: Loop,
    axis: _jax.AxisData,
    places: Operands,
    y_places: Sequence[Any],
    active: Active,
) -> Split:
    """Return the vmap of a split, residual for residual. Every active input has the new axis.

    `y_places` says where the axis is in the ys. If lanes stop separately, ys that are equal in all
    lanes have the axis, too.
    """
    slices = in_row(places.xs, loop.x_axes)
    consts, carry = places.consts, places.init
    hoist, hoisted = _jax.batch_jaxpr(
        split.hoist, axis, consts, ["free"] * len(split.hoist.out_avals)
    )
    lane = min([len(loop.lanes), *(a for a in carry if a is not None)])
    rows = in_row(y_places, loop.y_axes)
    ys = [
        a if a is not None else lane if moves else "free"
        for a, moves in zip(rows, active.ys, strict=True)
    ]
    forward, flags = _jax.batch_jaxpr(
        split.forward,
        axis,
        [*consts, *carry, *slices],
        [*carry, *ys, *["free"] * len(split.stored_types)],
    )
    stored = flags[split.results :]

    def make_backward(live: Active, unused_init: Sequence[bool]) -> _jax.Jaxpr:
        cts = [*kept(consts, live.consts), *kept(carry, live.carry)]
        cts += [lane for a in live.ys if a]
        outs = [*kept(consts, live.consts), *kept(carry, live.carry), *kept(slices, live.xs)]
        ins = [*consts, *places_at(hoisted, 0), *slices, *places_at(stored, 0), *cts]
        return _jax.batch_jaxpr(split.backward(live, unused_init), axis, ins, outs)[0]

    return replace(
        split,
        hoist=hoist,
        forward=forward,
        backward=make_backward,
        holds_wide=False,
        stored_batched=tuple(stored),
    )


def cut_ahead(
    forward: _jax.Jaxpr, loop: Loop, operands: Operands
) -> tuple[_jax.Jaxpr, Loop, Operands]:
    """Return the forward half of a step, the loop and its operands, with slices as constants.

    A matrix product reads whole arrays, and compilers leave the slices of its operands in the loop,
    where each step copies them. The backward sweep reads whole constants, because their cotangents
    are sums over whole arrays.
    """
    if loop.lanes:  # constants may have lane axes
        return forward, loop, operands
    steps = [_jax.open_jaxpr(j) for j in (forward, loop.body)]
    found = [_slices_of_constants(j, loop.const_count) for j in steps]
    slices = list(dict.fromkeys(v for _, some in found for v in some))
    if not slices:
        return forward, loop, operands
    values: dict[Any, Any] = {}
    for j, (eqns, some) in zip(steps, found, strict=True):
        env = dict(zip(j.invars, operands.consts, strict=False))
        values |= zip(some, equations.run(eqns, env, some), strict=True)
    forward, body = (
        _with_slices(j, loop.const_count, slices, set(some))
        for j, (_, some) in zip(steps, found, strict=True)
    )
    loop = loop.replace(body=body, consts=loop.consts + (Const(),) * len(slices))
    return forward, loop, operands._replace(consts=[*operands.consts, *map(values.get, slices)])


def _slices_of_constants(j: _jax.OpenJaxpr, count: int) -> tuple[list, list]:
    """Return the equations that slice constants, and those of their results that are read whole."""
    consts, cut, eqns, read = set(j.invars[:count]), set(), [], []
    for eqn in j.eqns:
        name, values = eqn.primitive.name, equations.variables(eqn)
        of = consts | cut if name == "slice" else cut if name in SAME_ORDER else set()
        if of.intersection(values):
            cut.update(eqn.outvars)
            eqns.append(eqn)
        elif name in WHOLE or equations.jaxprs_in(eqn):
            read += values
    return eqns, [v for v in dict.fromkeys(read) if v in cut]


def _with_slices(j: _jax.OpenJaxpr, count: int, slices: Sequence[Any], own: set) -> _jax.Jaxpr:
    """Return the step with `slices` as further constants, of which it reads its `own`."""
    more = [v if v in own else _jax.like(v) for v in slices]
    eqns = [eqn for eqn in j.eqns if own.isdisjoint(eqn.outvars)]
    inputs = [*j.invars[:count], *more, *j.invars[count:]]
    info = j.debug_info.with_unknown_names()
    step = _jax.with_equations(j, eqns, invars=inputs, debug_info=info)
    return _jax.dce(step, [True] * len(j.outvars), [True] * len(inputs))[0]
