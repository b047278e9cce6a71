"""List the choices for the loops of a program, from the fastest to the smallest.

An inner loop is part of the outer loop's step. What it saves counts once if the outer loop runs its
steps again, and once per step otherwise. So a choice for the outer loop covers all loops in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

from loopkit import _jax
from loopkit._engine.derivative.linearised import linearised
from loopkit._engine.derivative.reversal import NotReversedError, asked, reversal, step_costs
from loopkit._engine.derivative.timeline import (
    Outside,
    Timeline,
    all_at_once,
    key_of,
    met_in,
    saved_bytes,
    timeline,
)
from loopkit._engine.facts.activity import moving_activity, whole_activity
from loopkit._engine.loop import Active, Const, Loop, Output
from loopkit._jaxprs import equations
from loopkit._jaxprs.compiled_memory import kept_by_compiler
from loopkit._jaxprs.min_cut import Residuals
from loopkit._plans.budget import Bytes, Part
from loopkit._plans.cheapest import steps_of
from loopkit._plans.one_price import (
    Choice,
    Choices,
    Count,
    State,
    by_price,
    fastest_first,
    few,
    host_prices,
    state_of,
    without_dominated,
)
from loopkit._plans.plan import Plan
from loopkit._plans.planner import all_plans

INNER_CHOICES = 5
"""The most choices of the loops in a step for which the step is split again."""


def with_budget(eqn: _jax.Equation, budget: Bytes, made: Callable = lambda loop: loop) -> Any:
    """Return the equation of a loop with another budget."""
    loop = made(eqn.params["loop"].with_bytes(budget))
    return eqn.replace(params=eqn.params | {"loop": loop})


def timeline_of(
    jaxpr: _jax.Jaxpr, moves: Sequence[bool], budget: Bytes
) -> tuple[Timeline, Choices]:
    """Return the memory timeline of the gradient of a program, and the choices of its loops.

    The gradient is with respect to the inputs marked in `moves`. If there is none, there may be one
    in fewer inputs. Then the timeline assumes that all loops with a derivative save at once.
    """
    body = equations.inlined(jaxpr)
    with suppress(NotReversedError):
        line = _of_gradient(body, moves)
        return line, {k: choices_of(m.loop, m.active, budget) for k, m in line.loops.items()}
    loops, choices = [], {}
    for met in (m for e in _jax.open_jaxpr(body).eqns for m in met_in(e, primal=True)):
        with suppress(NotReversedError):
            with asked():
                each = met._replace(active=whole_activity(met.loop))
            choices[met.key] = choices_of(each.loop, each.active, budget)
            loops.append(each)
    return all_at_once(loops), choices


def _of_gradient(body: _jax.Jaxpr, moves: Sequence[bool]) -> Timeline:
    n, results = len(body.in_avals), len(body.out_avals)
    loop = Loop(None, body, 0, (Const(),) * n, (), (), (Output(),) * results, 1)
    differ = map(_jax.is_differentiable, body.in_avals)
    flags = [a and b for a, b in zip(moves, differ, strict=True)]
    with asked():
        active = moving_activity(loop, loop.split(flags)[0])
        whole = linearised(loop, active)
    free = Residuals(whole.residuals.jaxpr, results, 0, n, [True] * n, device=loop.device)
    stored = kept_by_compiler(free, whole.tangents)
    return timeline(free, whole.tangents, Outside(n, sum(active.inputs), True, stored))


def predicted(jaxpr: _jax.Jaxpr, moves: Sequence[bool]) -> tuple[Timeline, State]:
    """Return the timeline of the gradient of a program whose loops have budgets, and its state."""
    line, choices = timeline_of(jaxpr, moves, Bytes(1))
    return line, state_of(line.moments, {key: some[0] for key, some in choices.items()})


def choices_of(loop: Loop, active: Active, budget: Bytes) -> list[Choice]:
    """Return the choices for a loop, from the fastest to the smallest."""
    key = "choices", active, budget.count, budget.host
    return loop.derived(key, lambda: _choices(loop, active, budget))


def _choices(loop: Loop, active: Active, budget: Bytes) -> list[Choice]:
    with asked():
        whole = linearised(loop, active)
    line = timeline(whole.residuals, whole.tangents)
    moments = without_dominated(line.moments)
    inner = {k: choices_of(m.loop, m.active, budget) for k, m in line.loops.items()}
    states = few(by_price(moments, inner), INNER_CHOICES)
    if key_of(loop) is loop:  # it has its own budget
        with asked():
            plan = reversal(loop, active).plan
        return [_choice(plan, states[0], None)]
    found = []
    for state in states:
        made = loop.map_jaxprs(partial(settled, state=state))
        with asked():
            steps = step_costs(made, active)
        for step in steps:
            plans = all_plans(budget, loop.length, loop.cond is None, step)
            found += [_choice(plan, state, key_of(loop)) for plan in plans]
    prices = host_prices(budget.host)
    best = (c for price in prices for c in fastest_first(found, methodcaller("size", price)))
    return sorted(dict.fromkeys(best), key=lambda c: c.nanoseconds)


def _choice(plan: Plan, step: State, number: Any) -> Choice:
    """Return the choice of a loop with this plan, and with this state for the loops in its step."""
    saved, steps = saved_bytes(plan), steps_of(plan)
    time = plan.nanoseconds(steps) + steps * step.nanoseconds
    working = max(0, plan.peak_bytes - saved) + step.bytes
    host = plan.host_bytes if plan.host else 0
    counts = step.counts
    if number is not None:
        on_host = max(1, host) if plan.host else None
        counts = Count(number, max(1, plan.peak_bytes), on_host), *counts
    return Choice(saved, working, time, host + step.host, counts)


def settled(numbered: _jax.Jaxpr, state: State, made: Callable = lambda loop: loop) -> _jax.Jaxpr:
    """Return a program with the budgets of a state for its loops."""
    counts = {count.number: count for count in state.counts}

    def with_its_part(eqn: _jax.Equation) -> Any:
        part = getattr(eqn.params.get("loop"), "checkpoints", None)
        if not isinstance(part, Part) or not part.number:
            return eqn
        _, device, host = counts.get(part.number, (part.number, part.count, part.host))
        return with_budget(eqn, replace(part, count=device, host=host, number=None), made)

    return equations.map_equations(numbered, with_its_part)
