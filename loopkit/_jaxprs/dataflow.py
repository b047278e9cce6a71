"""Walk a jaxpr from its inputs to its results, through calls: with values, or with facts.

If a rule returns arrays, the walk evaluates the jaxpr. If it returns facts, the elements of a
lattice, the walk analyses the jaxpr. A rule handles one equation. This file handles the recursion
through calls, and the fixed point of the facts that a step passes to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import or_
from typing import Any

from loopkit import _jax
from loopkit._jaxprs.equations import is_call, run

Rule = Callable[[Any, list], Sequence[Any] | None]
"""`(equation, operands)` returns the results, or None to enter a call or to bind the equation."""


def interpret(
    j: _jax.OpenJaxpr, values: Sequence[Any], rule: Rule, literal: Callable = lambda value: value
) -> list:
    """Return the results of an open jaxpr, with a rule that returns those of each equation.

    The values begin with the constants. `literal` is applied to arrays in the program.
    """

    def made(eqn: _jax.Equation, ins: list) -> Sequence[Any]:
        if (found := rule(eqn, ins)) is not None:
            return found
        if not is_call(eqn):
            return _jax.bind_equation(eqn, ins)
        jaxpr = eqn.params["jaxpr"]
        consts = map(literal, getattr(jaxpr, "consts", ()))
        return interpret(_jax.open_jaxpr(jaxpr), [*consts, *ins], rule, literal)

    env = dict(zip((*j.constvars, *j.invars), values, strict=True))
    return run(j.eqns, env, j.outvars, made, literal)


def interpret_marked(j: _jax.OpenJaxpr, values: Sequence[Any], mark: type, rule: Rule) -> list:
    """Return the results of an open jaxpr, some of whose values are of the type `mark`.

    The rule handles equations with a marked operand. All others are evaluated as they are.
    """

    def of_marked(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
        if not any(isinstance(v, mark) for v in ins):
            return _jax.bind_equation(eqn, ins)
        return None if is_call(eqn) else rule(eqn, ins)

    return interpret(j, values, of_marked)


def analyse(
    jaxpr: _jax.Jaxpr, facts: Sequence[Any], transfer: Callable[[Any, list], Sequence], nothing: Any
) -> list:
    """Return the facts of the results, from those of the inputs.

    The fact `nothing` holds for arrays in the program, and for results of operands that all have
    it. The walk enters no branch and no loop, unless the transfer function does.
    """
    j = _jax.open_jaxpr(jaxpr)

    def rule(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
        if all(fact == nothing for fact in ins):
            return [nothing] * len(eqn.outvars)
        return None if is_call(eqn) else transfer(eqn, ins)

    return interpret(j, [*[nothing] * len(j.constvars), *facts], rule, lambda _: nothing)


def fixed_point(facts: Sequence[Any], step: Callable, join: Callable = or_) -> tuple:
    """Return the least fixed point of a step above these facts, and what else the step returns.

    `step(facts)` returns the facts that a step passes on, and more. By default, facts are flags.
    """
    now = list(facts)
    while True:
        after, *found = step(now)
        new = list(map(join, now, after))
        if new == now:
            return now, *found
        now = new
