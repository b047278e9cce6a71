"""How the loops of a program share a budget: `one_price.py` chooses among their plans.

A loop in another loop is a part of its step. What it saves counts once if the outer loop runs its
steps again, and for each step otherwise. So a choice for the outer loop is one for all loops in it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.linearised import linearised
from loopkit._engine.derivative.reversal import reversal, step_costs
from loopkit._engine.derivative.timeline import (
    Timeline,
    all_at_once,
    key_of,
    met_in,
    saved_bytes,
    timeline,
)
from loopkit._engine.facts.activity import whole_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Const, Loop, Output, kept
from loopkit._jaxprs import equations
from loopkit._jaxprs.min_cut import Residuals
from loopkit._plans.budget import Bytes, Part
from loopkit._plans.cheapest import steps_of
from loopkit._plans.one_price import (
    Choice,
    Choices,
    Count,
    State,
    best_within,
    by_price,
    fastest_first,
    few,
    state_of,
    without_dominated,
)
from loopkit._plans.plan import Plan
from loopkit._plans.planner import all_plans
from loopkit._programs import shared

FACTS = "linearised", "split", "forward activity", "backward activity"
"""Keys of what is derived of a loop and does not depend on its budget."""
COMPILED = 4
"""How often a gradient is compiled, at most, to fit in a budget. The last plan is the smallest."""
NO_DERIVATIVE = TypeError, ValueError, NotImplementedError, RuntimeError
"""Errors of JAX, loopkit and rules, if there is no derivative or a budget is too small for it."""
INNER_CHOICES = 5
"""For how many choices of the loops in a step the step is split again."""


def with_parts(jaxpr: _jax.Jaxpr) -> Any:
    """Return a program whose loops each have a part of their common budget.

    The parts are for the gradient in all inputs. Only loops without a number take part.
    """
    count, budget = 0, None

    def with_number(eqn: _jax.Equation) -> Any:
        nonlocal count, budget
        part = getattr(eqn.params.get("loop"), "checkpoints", None)
        if not isinstance(part, Part) or part.number != 0:
            return eqn
        count, budget = count + 1, part
        return _with_budget(eqn, replace(part, number=count))

    numbered = equations.map_equations(jaxpr, with_number)
    if budget is None:
        return jaxpr
    line, choices = timeline_of(numbered, budget)
    if budget.measured:
        return _measured(numbered, budget, line, choices)
    found, least = best_within(budget.count, budget.host, line.moments, choices)
    refusal = "" if found is not None else _refusal(budget, least, line)
    return _settled(numbered, found or least, refusal)


def _measured(numbered: _jax.Jaxpr, budget: Part, line: Timeline, choices: Choices) -> Any:
    """Return the program for which the compiler needs no more than the budget.

    If it needs more, loopkit plans with fewer bytes: in proportion, and then by what is too much.
    """
    count, tries = budget.count, 1
    while True:
        found, least = best_within(count, None, line.moments, choices)
        made = _settled(numbered, found or least)
        needed = temporary_bytes(made)
        if needed <= budget.count:
            return made
        if found is None:
            break
        tries += 1
        by_proportion = found.bytes * budget.count // needed
        by_excess = found.bytes - (needed - budget.count)
        count = {2: by_proportion, COMPILED: 0}.get(tries, by_excess)
    refusal = (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes, which the smallest plan "
        f"needs once it is compiled. Pass `memory={needed}` or more. Got: {budget.count} bytes."
    )
    return _settled(numbered, least, refusal)


def temporary_bytes(jaxpr: _jax.Jaxpr) -> int:
    """Return the compiler's figure for the temporary memory of the gradient in all inputs."""
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in jaxpr.in_avals]
    compiled = jax.jit(_gradient_of(jaxpr)).lower(*types).compile()
    figures: Any = compiled.memory_analysis()
    return figures.temp_size_in_bytes


def _gradient_of(jaxpr: _jax.Jaxpr) -> Callable:
    """Return the function from the inputs of a program to their cotangents, for ones."""
    outs = list(map(_jax.is_differentiable, jaxpr.out_avals))
    ins = list(map(_jax.is_differentiable, jaxpr.in_avals))

    def gradient(*values: jax.Array) -> Any:
        def of(*moving: jax.Array) -> list:
            return kept(_jax.call_jaxpr(jaxpr)(*spread(moving, ins, values)), outs)

        results, pullback = jax.vjp(of, *kept(values, ins))
        return pullback([jax.numpy.ones_like(v) for v in results])

    return gradient


def _settled(numbered: _jax.Jaxpr, state: State, refusal: str = "") -> Any:
    """Return the program whose loops have the parts of a state."""
    counts = {count.number: count for count in state.counts}

    def with_its_part(eqn: _jax.Equation) -> Any:
        part = getattr(eqn.params.get("loop"), "checkpoints", None)
        if not isinstance(part, Part) or part.number is None:
            return eqn
        _, device, host = counts.get(part.number, (part.number, part.count, part.host))
        settled = replace(part, count=device, host=host, number=None, refusal=refusal)
        return _with_budget(eqn, settled, shared)

    return equations.map_equations(numbered, with_its_part)


def _with_budget(eqn: _jax.Equation, budget: Bytes, made: Callable = lambda loop: loop) -> Any:
    """Return the equation of a loop with another budget. What does not depend on it stays."""
    loop = eqn.params["loop"]
    new = made(loop.replace(checkpoints=budget))
    for key, value in loop.memory.items():
        if isinstance(key, tuple) and key[0] in FACTS:
            new.memory.setdefault(key, value)
    return eqn.replace(params=eqn.params | {"loop": new})


def timeline_of(jaxpr: _jax.Jaxpr, budget: Bytes) -> tuple[Timeline, Choices]:
    """Return what lives while the gradient of a program is computed, and the choices of its loops.

    If there is no derivative in all inputs, there may be one in some. Then all loops that have a
    derivative live at the same time.
    """
    body = equations.inlined(jaxpr)
    with suppress(*NO_DERIVATIVE):
        line = _of_gradient(body)
        return line, {k: choices_of(m.loop, m.active, budget) for k, m in line.loops.items()}
    loops, choices = [], {}
    for met in (m for e in _jax.open_jaxpr(body).eqns for m in met_in(e, primal=True)):
        with suppress(*NO_DERIVATIVE):
            each = met._replace(active=whole_activity(met.loop))
            choices[met.key] = choices_of(each.loop, each.active, budget)
            loops.append(each)
    return all_at_once(loops), choices


def _of_gradient(body: _jax.Jaxpr) -> Timeline:
    n, results = len(body.in_avals), len(body.out_avals)
    loop = Loop(None, body, 0, (Const(),) * n, (), (), (Output(),) * results, 1)
    whole = linearised(loop, whole_activity(loop))
    free = Residuals(whole.residuals.jaxpr, results, 0, n, [True] * n)
    return timeline(free, whole.tangents, whole=True)


def predicted(jaxpr: _jax.Jaxpr) -> tuple[Timeline, State]:
    """Return what lives while the gradient of a program is computed, whose loops have budgets."""
    line, choices = timeline_of(jaxpr, Bytes(1))
    return line, state_of(line.moments, {key: some[0] for key, some in choices.items()})


def choices_of(loop: Loop, active: Active, budget: Bytes) -> list[Choice]:
    """Return what a loop may need, from the fastest to the smallest."""
    key = "choices", active, budget.count, budget.host
    return loop.derived(key, lambda: _choices(loop, active, budget))


def _choices(loop: Loop, active: Active, budget: Bytes) -> list[Choice]:
    whole = linearised(loop, active)
    line = timeline(whole.residuals, whole.tangents)
    moments = without_dominated(line.moments)
    inner = {k: choices_of(m.loop, m.active, budget) for k, m in line.loops.items()}
    states = few(by_price(moments, inner), INNER_CHOICES)
    if key_of(loop) is loop:  # a budget of its own
        return [_choice(reversal(loop, active).plan, states[0], None)]
    found = []
    for state in states:
        made = _with_counts(loop, state)
        for step in step_costs(made, active):
            plans = all_plans(budget, loop.length, loop.cond is None, step)
            found += [_choice(plan, state, key_of(loop)) for plan in plans]
    return fastest_first(found, lambda c: c.saved + c.working)


def _choice(plan: Plan, step: State, number: Any) -> Choice:
    """Return what a loop needs with a plan, and a choice for the loops in its step."""
    saved, steps = saved_bytes(plan), steps_of(plan)
    time = plan.nanoseconds(steps) + steps * step.nanoseconds
    working = max(0, plan.peak_bytes - saved) + step.bytes
    host = plan.host_bytes if plan.host else 0
    counts = step.counts
    if number is not None:
        on_host = max(1, host) if plan.host else None
        counts = Count(number, max(1, plan.peak_bytes), on_host), *counts
    return Choice(saved, working, time, host + step.host, counts)


def _with_counts(loop: Loop, state: State) -> Loop:
    """Return the loop with these budgets for the loops in its step."""
    counts = {count.number: count for count in state.counts}
    if not counts:
        return loop

    def with_count(eqn: _jax.Equation) -> Any:
        part = getattr(eqn.params.get("loop"), "checkpoints", None)
        if not isinstance(part, Part) or part.number not in counts:
            return eqn
        _, device, host = counts[part.number]
        return _with_budget(eqn, replace(part, count=device, host=host, number=None))

    return loop.replace(body=equations.map_equations(loop.body, with_count))


def _refusal(budget: Bytes, least: State, line: Timeline) -> str:
    """Return the error for a budget in which no gradient of the program fits."""
    where, needed, got, advice = "", least.bytes, budget.count, f"`memory={least.bytes}` or more"
    if budget.host is not None:
        where, advice = " on the device", f"{needed} or more for 'device'"
        if least.host > budget.host:
            where, needed, got = " on the host", least.host, budget.host
            advice = f"{needed} or more for 'host'"
    most, count = max(line.holders(least), key=lambda pair: pair[1])
    return (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes{where}. Most of it, "
        f"{count} bytes, is for {most}. Pass {advice}. Got: {got} bytes."
    )
