"""Fit the gradient of a program into a budget that its loops share with the code between them.

`straight_line.py` finds ways to run code between loops again. In each, `one_price.py` chooses among
the plans of the loops. loopkit takes the fastest way that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.error_on_use import without_gradient
from loopkit._engine.derivative.choices import with_budget
from loopkit._engine.derivative.ways import Best, NotCompiledError, Ways
from loopkit._engine.primitives import dual_p, while_p
from loopkit._jaxprs import equations
from loopkit._plans.budget import Bytes, Part

COMPILED = 5
"""How often a gradient is compiled to fit in a budget; the last time with the smallest plan."""
HALVINGS = 4
"""The most compilations to find the fastest plan between one that fits and one that does not."""
WORTH = 1.25
"""The least ratio of the times of a plan that fits and one that does not to search in between."""
SMALLEST = 4
"""The number of ways whose smallest plans are compiled if nothing else fits."""
FLATTEST = 0.25
"""The fewest compiled bytes that removing one byte from a plan is assumed to save."""
TOO_HIGH = 8
"""The predicted bytes, as a multiple of the budget, up to which a gradient is compiled before the
budget is refused."""
WITH_PARTS = while_p, dual_p
"""The primitives of loops that get parts. The layout of what other loops save is fixed already."""


def with_parts(jaxpr: _jax.Jaxpr, budget: Part, first: Sequence[Any], asked: Sequence[bool]) -> Any:
    """Return a program that fits in a budget: some code runs again, and loops have parts of it.

    The parts are for the gradient in all inputs, and what is compiled to see whether they fit is
    the gradient in the inputs marked in `asked`. Only loops without a number get a part.

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
        if loop is None or eqn.primitive not in WITH_PARTS:
            return eqn
        part = budget if loop.checkpoints is None else loop.checkpoints
        if not isinstance(part, Part) or part.number != 0:
            return eqn
        count += 1
        # A loop that occurs several times is differentiated once.
        _, memory = derived.setdefault(id(loop), (loop, dict(loop.step_memory)))
        sharing = lambda numbered: numbered.replace(step_memory=memory)
        return with_budget(eqn, replace(part, number=count), sharing)

    numbered = equations.map_equations(jaxpr, with_number)
    ways = Ways(numbered, budget, first, asked)
    if not ways.first and not ways.others:  # it has no derivative
        return jaxpr
    if budget.measured:
        return _measured(ways, ways.within(budget.count, budget.host))
    best = ways.with_margin()
    if best.fits:
        return ways.settled(best)
    if _may_fit(budget, best) and not _axes_around(jaxpr):
        return _smallest(ways, best)
    return _refused(ways.settled(best), _refusal(budget, best))


def _may_fit(budget: Part, best: Best) -> bool:
    """Return whether the smallest way is predicted not to fit, but may do so once compiled."""
    return budget.host is None and budget.count < best.state.bytes <= TOO_HIGH * budget.count


def _axes_around(jaxpr: _jax.Jaxpr) -> list[str]:
    """Return the mapped axes around a program, without which it cannot be compiled."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return sorted({*_jax.free_axes(jaxpr.effects), *manual})


def _measured(ways: Ways, best: Best) -> Any:
    """Return a program whose compiled gradient needs no more than the budget.

    While it needs more, loopkit plans with fewer bytes: first in proportion, then by extrapolation
    from the last two plans, and finally with the fewest bytes.
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
    made, needed = _smaller(ways, best, made, needed)
    return made if needed <= limit else _refused(made, _refusal_as_compiled(limit, needed, best))


def _smaller(ways: Ways, best: Best, made: Any, needed: int) -> tuple[Any, int]:
    """Return a program that needs less than `made` once it is compiled, and its bytes.

    It is the first that fits in the budget or, if none does, the smallest.
    """
    others = (other for other in ways.smallest()[:SMALLEST] if other.way is not best.way)
    for compiled in (ways.untouched, *(partial(ways.compiled, other) for other in others)):
        if (found := compiled()) is not None and found[1] < needed:
            made, needed = found
        if needed <= ways.budget.count:
            break
    return made, needed


def _with_room(ways: Ways, best: Best, made: Any, needed: int) -> Any:
    """Return a faster program that uses bytes that were predicted but not needed, if it fits."""
    limit = ways.budget.count
    more = ways.within(best.state.bytes * limit // max(1, needed), None)
    if more.nanoseconds >= best.nanoseconds:
        return made
    faster, larger = ways.compiled(more)
    return faster if larger <= limit else _fastest_between(ways, more, best, made)


def _fastest_between(ways: Ways, larger: Best, best: Best, made: Any) -> Any:
    """Return the fastest program found that fits, between `larger` and `made`, which fits."""
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
    """Return the program in its smallest way or, if the compiler leaves room, in a faster one."""
    budget = ways.budget
    try:
        made, needed = ways.compiled(best)
    except NotCompiledError:
        made = ways.settled(best)
        return _refused(made, _refusal(budget, best))
    if needed <= budget.count:
        return _with_room(ways, best, made, needed)
    made, needed = _smaller(ways, best, made, needed)
    if needed <= budget.count:
        return made
    if needed < best.state.bytes:
        return _refused(made, _refusal_as_compiled(budget.count, needed, best))
    return _refused(made, _refusal(budget, best, f"; the compiler needs {needed} bytes for it"))


def _refused(jaxpr: _jax.Jaxpr, reason: str) -> Any:
    """Return the program with a gradient that raises an error."""
    run = lambda *values: without_gradient(_jax.call_jaxpr(jaxpr)(*values), reason)
    return _jax.trace_closed(run, jaxpr.in_avals, "refused")


def _refusal(budget: Bytes, best: Best, more: str = "") -> str:
    """Return the error message for a budget in which no gradient of the program fits.

    `more` says what the compiler needs for the smallest plan.
    """
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
        f"{count} bytes, is for {most}. Pass {advice}{more}. Got: {got} bytes."
    )


def _refusal_as_compiled(limit: int, needed: int, best: Best) -> str:
    """Return the error message for a budget in which no gradient fits once it is compiled."""
    return (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes, which the smallest plan "
        f"needs once it is compiled. Most of it is for {_holds_most(best)[0]}. "
        f"Pass `memory={needed}` or more. Got: {limit} bytes."
    )


def _holds_most(best: Best) -> tuple[str, int]:
    """Return what holds most of the memory at the peak, and its bytes."""
    return max(best.way.line.holders(best.state), key=lambda pair: pair[1])
