"""Walk a jaxpr from its inputs to its results, through calls: with values, or with facts of them.

Where a rule gives arrays, a walk evaluates a jaxpr again. Where it gives facts, the elements of a
lattice, a walk analyses the jaxpr. A rule speaks of one equation: recursion through calls and
branches, and the fixed point of what steps hand on to one another, are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import or_
from typing import Any

from loopkit import _jax
from loopkit._jaxprs.equations import is_call, run

Rule = Callable[[Any, list], Sequence[Any] | None]
"""`(equation, operands)`: the results; None where a call is entered, or an equation is bound."""
After = Callable[[Any, list], tuple[Any, Sequence[Any]]]
"""`(equation, facts of operands)`: the equation as it is then, and the facts of its results."""


def interpret(
    j: _jax.OpenJaxpr, values: Sequence[Any], rule: Rule, literal: Callable = lambda value: value
) -> list:
    """Return the results of an open jaxpr, those of each equation by a rule.

    Constants come first among the values. `literal` is applied to arrays in the program.
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

    The rule is asked of equations with a marked operand. All others are evaluated as they are.
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

    There is `nothing` to say of arrays in the program, and of what follows from nothing else. No
    branch and no loop is entered, unless the transfer function does that.
    """
    j = _jax.open_jaxpr(jaxpr)

    def rule(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
        if all(fact == nothing for fact in ins):
            return [nothing] * len(eqn.outvars)
        return None if is_call(eqn) else transfer(eqn, ins)

    return interpret(j, [*[nothing] * len(j.constvars), *facts], rule, lambda _: nothing)


def follow(
    jaxpr: _jax.Jaxpr, facts: Sequence[Any], after: After, literal: Callable, join: Callable
) -> tuple[Any, list]:
    """Return a jaxpr with its equations as `after` makes them, and the facts of its results.

    Calls and branches are followed inside. `join` is applied to the facts of all branches.
    """
    j, eqns = _jax.open_jaxpr(jaxpr), []

    def made(eqn: _jax.Equation, ins: list) -> Sequence[Any]:
        inside = follow_inside(eqn, ins, after, literal, join)
        eqn, outs = after(eqn, ins) if inside is None else inside
        eqns.append(eqn)
        return outs

    consts = map(literal, getattr(jaxpr, "consts", ()))
    env = dict(zip((*j.constvars, *j.invars), (*consts, *facts), strict=True))
    outs = run(j.eqns, env, j.outvars, made, literal)
    if any(a is not b for a, b in zip(eqns, j.eqns, strict=True)):
        new = j.replace(eqns=eqns)
        jaxpr = new if j is jaxpr else jaxpr.replace(jaxpr=new)
    return jaxpr, outs


def follow_inside(
    eqn: _jax.Equation, ins: list, after: After, literal: Callable, join: Callable
) -> tuple[Any, Sequence[Any]] | None:
    """Follow the jaxprs of a call or of a branch; None for any other equation."""
    if eqn.primitive.name == "cond":
        ins, old = ins[1:], eqn.params["branches"]
    elif is_call(eqn):
        old = (eqn.params["jaxpr"],)
    else:
        return None
    new, outs = zip(*(follow(j, ins, after, literal, join) for j in old), strict=True)
    if any(a is not b for a, b in zip(new, old, strict=True)):
        changed = {"jaxpr": new[0]} if is_call(eqn) else {"branches": new}
        eqn = eqn.replace(params=eqn.params | changed)
    return eqn, list(map(join, zip(*outs, strict=True)))


def fixed_point(facts: Sequence[Any], step: Callable, join: Callable = or_) -> tuple:
    """Return the least facts, with these, to which a step adds none; and what else it finds.

    `step(facts)`: the facts of what it hands on, and more. By default, facts are flags.
    """
    now = list(facts)
    while True:
        after, *found = step(now)
        new = list(map(join, now, after))
        if new == now:
            return now, *found
        now = new
