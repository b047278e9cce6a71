"""A budget for the gradient of a program: its loops share it with the code between them.

Code between loops runs again in some ways (`straight_line.py`). In each, `one_price.py` chooses
among the plans of the loops. The fastest way that fits is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.no_gradient import without_gradient
from loopkit._engine.derivative.choices import with_budget
from loopkit._engine.derivative.ways import Best, NotCompiledError, Ways, settled
from loopkit._engine.primitives import dual_p, while_p
from loopkit._jaxprs import equations
from loopkit._plans.budget import Bytes, Part

COMPILED = 5
"""How often a gradient is compiled to fit in a budget, until the plan is the smallest."""
HALVINGS = 4
"""How often a gradient is compiled for the fastest plan between one that fits and one that does
not."""
WORTH = 1.25
"""The least time of a plan that fits, relative to one that does not, with which that is tried."""
SMALLEST = 4
"""How many of the smallest plans are compiled then."""
FLATTEST = 0.25
"""The least bytes of the compiler's that a byte less of a plan is taken to save."""
TOO_HIGH = 8
"""How many times the compiler's figure a prediction may be. Up to this, a gradient is compiled
before its budget is refused."""
WITH_PARTS = while_p, dual_p
"""The primitives of loops that take part. What the others save, or have saved, is laid out."""


def with_parts(jaxpr: _jax.Jaxpr, budget: Part, first: Sequence[Any] = ()) -> Any:
    """Return a program of which code runs again, and whose loops have parts of a budget.

    The parts are for the gradient in all inputs. Only loops without a number take part.

    `first` has the values of the first inputs. The compiler gets those that are known.
    """
    if budget.measured and (axes := _axes_around(jaxpr)):
        expected = "cannot be True under `jax.shard_map`, or where `fn` exchanges values along an "
        expected += "axis around it"
        got = f"a function of the axis {', '.join(map(repr, axes))}"
        advice = "Leave it out, or put `checkpointed` around what has that axis."
        raise errors.wrong_value("checkpointed", "measure", expected, got, advice)
    count, derived = 0, {}

    def with_number(eqn: _jax.Equation) -> Any:
        nonlocal count
        loop: Any = eqn.params.get("loop")
        part = getattr(loop, "checkpoints", None)
        if not isinstance(part, Part) or part.number != 0 or eqn.primitive not in WITH_PARTS:
            return eqn
        count += 1
        # A loop that the program has several times is differentiated once.
        _, memory = derived.setdefault(id(loop), (loop, dict(loop.step_memory)))
        sharing = lambda numbered: numbered.replace(step_memory=memory)
        return with_budget(eqn, replace(part, number=count), sharing)

    numbered = equations.map_equations(jaxpr, with_number)
    ways = Ways(numbered, budget, first)
    if not ways.first and not ways.others:  # it has no derivative
        return jaxpr
    if budget.measured:
        return _measured(ways, ways.within(budget.count, budget.host))
    best = ways.with_margin()
    if best.fits:
        return settled(best.way.program(), best.state)
    if _may_fit(budget, best) and not _axes_around(jaxpr):
        return _smallest(ways, best)
    return _refused(settled(best.way.program(), best.state), _refusal(budget, best))


def _may_fit(budget: Part, best: Best) -> bool:
    """Return whether the smallest way is predicted to need too much, but so little that the
    compiler may need less."""
    return budget.host is None and budget.count < best.state.bytes <= TOO_HIGH * budget.count


def _axes_around(jaxpr: _jax.Jaxpr) -> list[str]:
    """Return the axes without which a program cannot be compiled: it is a part of what has them."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return sorted({*_jax.free_axes(jaxpr.effects), *manual})


def _measured(ways: Ways, best: Best) -> Any:
    """Return the program for which the compiler needs no more than the budget.

    If it needs more, loopkit plans with fewer bytes: in proportion, then by what the last two plans
    say of the others, and last with as few as can be.
    """
    limit = ways.budget.count
    made, needed = ways.compiled(best)
    if needed <= limit:
        return _with_room(ways, best, made, needed)
    fewer = best.state.bytes * limit // needed
    for tries in range(2, COMPILED + 1):
        if not best.fits:
            break
        larger, more = best, needed
        best = ways.within(0 if tries == COMPILED else fewer, None)
        made, needed = ways.compiled(best)
        if needed <= limit:
            return _fastest_between(ways, larger, best, made)
        saved = (more - needed) / max(1, larger.state.bytes - best.state.bytes)
        fewer = best.state.bytes - int(1.1 * (needed - limit) / min(max(saved, FLATTEST), 1))
    for other in ways.smallest()[:SMALLEST]:
        if other.way is not best.way:
            again, fewer = ways.compiled(other)
            if fewer <= limit:
                return again
            made, needed = min((made, needed), (again, fewer), key=lambda pair: pair[1])
    return _refused(made, _refusal_as_compiled(limit, needed, best))


def _with_room(ways: Ways, best: Best, made: Any, needed: int) -> Any:
    """Return a program that is faster by as much as was predicted too high, if it fits."""
    limit = ways.budget.count
    more = ways.within(best.state.bytes * limit // max(1, needed), None)
    if more.nanoseconds >= best.nanoseconds:
        return made
    faster, larger = ways.compiled(more)
    return faster if larger <= limit else _fastest_between(ways, more, best, made)


def _fastest_between(ways: Ways, larger: Best, best: Best, made: Any) -> Any:
    """Return the fastest program that fits between one that does not and one that does, `made`."""
    if best.nanoseconds < WORTH * larger.nanoseconds:
        return made
    between = ways.between(larger, best)
    for _ in range(HALVINGS):
        if not between:
            break
        half = len(between) // 2
        again, needed = ways.compiled(between[half])
        if needed <= ways.budget.count:
            made, between = again, between[:half]
        else:
            between = between[half + 1 :]
    return made


def _smallest(ways: Ways, best: Best) -> Any:
    """Return the program in its smallest way, or a faster one, if the compiler needs less than was
    predicted."""
    budget = ways.budget
    try:
        made, needed = ways.compiled(best)
    except NotCompiledError:
        made, needed = settled(best.way.program(), best.state), best.state.bytes
    if needed <= budget.count:
        return _with_room(ways, best, made, needed)
    if needed < best.state.bytes:
        return _refused(made, _refusal_as_compiled(budget.count, needed, best))
    return _refused(made, _refusal(budget, best))


def _refused(jaxpr: _jax.Jaxpr, reason: str) -> Any:
    """Return the program, whose gradient raises an error."""
    run = lambda *values: without_gradient(_jax.call_jaxpr(jaxpr)(*values), reason)
    return _jax.trace_closed(run, jaxpr.in_avals, "refused")


def _refusal(budget: Bytes, best: Best) -> str:
    """Return the error for a budget in which no gradient of the program fits."""
    least = best.state
    where, needed, got, advice = "", least.bytes, budget.count, f"`memory={least.bytes}` or more"
    if budget.host is not None:
        where, advice = " on the device", f"{needed} or more for 'device'"
        if least.host > budget.host:
            where, needed, got = " on the host", least.host, budget.host
            advice = f"{needed} or more for 'host'"
    most, count = _holds_most(best)
    return (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes{where}. Most of it, "
        f"{count} bytes, is for {most}. Pass {advice}. Got: {got} bytes."
    )


def _refusal_as_compiled(limit: int, needed: int, best: Best) -> str:
    """Return the error for a budget in which no gradient fits once it is compiled."""
    return (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes, which the smallest plan "
        f"needs once it is compiled. Most of it is for {_holds_most(best)[0]}. "
        f"Pass `memory={needed}` or more. Got: {limit} bytes."
    )


def _holds_most(best: Best) -> tuple[str, int]:
    """Return what holds most of the memory at the peak, and its bytes."""
    return max(best.way.line.holders(best.state), key=lambda pair: pair[1])
