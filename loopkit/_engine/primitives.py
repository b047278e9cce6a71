"""The six primitives. The modules in rules/ say how each is computed and transformed.

Let y = f(theta) be a loop, theta its constants, initial carry and xs, L its Jacobian and D its dual
loop (the same loop over values and tangents):

    while        f(theta)
    dual         f(theta), L t              forward mode: one loop
    forward      f(theta), checkpoints      the known half of `dual`
    pushforward  L t                        the linear half; transpose: pullback
    pullback     L^T w, from checkpoints    transpose: pushforward
    hessian      d/dtheta <w, L u>          its own transpose in u

D is itself a loop, so derivatives of any order are the same six on a longer carry. In forward mode,
`forward` and `pullback` return tangents after their results (rules/along.py).

An error in a loop that replaced a lax loop names the lax loop and suggests a fix: the user may not
know that loopkit runs it.
"""

from __future__ import annotations

import functools as ft
import re
from collections.abc import Callable
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations
from loopkit._programs import interned
from loopkit._progress.open_bars import closing_if_it_fails

while_p = _jax.declare("loopkit_while")
dual_p = _jax.declare("loopkit_dual")
forward_p = _jax.declare("loopkit_forward")
pushforward_p = _jax.declare("loopkit_pushforward")
pullback_p = _jax.declare("loopkit_pullback")
pullback_onto_p = _jax.declare("loopkit_pullback_onto")
"""A `pullback` that adds its results to existing arrays."""
hessian_p = _jax.declare("loopkit_hessian")
narrowed_p = _jax.declare("loopkit_narrowed")
"""One of the three linear primitives, for lanes that narrow: a derivative of all phases."""
evaluated_p = _jax.declare("loopkit_evaluated")
"""A jaxpr that computes a loop or its derivative. It has a JVP, and no transpose."""
READS: dict[Any, Callable] = {}
"""`rule(**params)` flags those first operands of a primitive that its transpose reads."""
PARTIAL_EVAL_RULES: dict[Any, Callable] = {}
"""`rule(used, **params)` returns which operands of a primitive its used results need, and a
function from these operands to those results; None if all operands are needed."""


def define(
    primitive: _jax.SeriesPrimitive, evaluate: Callable, types: Callable, **rules: Any
) -> None:
    """Define a primitive as `_jax.define` does, but compile equal equations once outside jit."""
    if primitive is not while_p:  # the others are derivatives
        evaluate, types = naming_the_loop(evaluate), naming_the_loop(types)
    rules.setdefault("taylor", _no_series)
    rules |= {k: naming_the_loop(rules[k]) for k in ("jvp", "taylor", "transpose") if k in rules}
    _jax.define(primitive, evaluate, types, run=_run, **rules)


def _no_series(*_: object, loop: Loop, **__: object) -> Any:
    problem = "jax.experimental.jet must not go through a gradient of the loop"
    advice = "Take the gradient of what jet returns, or nest jax.jvp."
    raise NotImplementedError(errors.message(loop.name, problem, "a gradient", advice))


def _run(
    compiled: Callable, evaluate: Callable, *operands: jax.typing.ArrayLike, **params: Any
) -> Any:
    if not params["loop"].shows:
        return _run_once(compiled, evaluate, *operands, **params)
    with closing_if_it_fails():
        return jax.block_until_ready(_run_once(compiled, evaluate, *operands, **params))


def _run_once(
    compiled: Callable, evaluate: Callable, *operands: jax.typing.ArrayLike, **params: Any
) -> Any:
    if params["loop"].lasting:
        return compiled(*operands, **params)
    # A loop with derivative rules equals no other loop, but the equations of its results may.
    types = list(map(jax.typeof, operands))
    with _jax.as_there(operands):
        jaxpr, closed_over = _jax.trace(lambda *values: evaluate(*values, **params), types, "loop")
        same = interned(_values(jaxpr), results_only=True)
        if same is None:
            return compiled(*operands, **params)
        return _evaluated(same, *closed_over, *operands)


def _values(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr with derivatives of loops replaced by equations, so that no rule is left."""

    def derives(eqn: _jax.Equation) -> bool:
        of_loop = eqn.primitive in _jax.evaluations and "loop" in eqn.params
        return of_loop and eqn.primitive is not while_p

    def change(eqn: _jax.Equation) -> Any:
        if not derives(eqn):
            return eqn
        evaluate = lambda *v: _jax.evaluations[eqn.primitive](*v, **eqn.params)
        inner = _jax.trace_closed(evaluate, [v.aval for v in eqn.invars], "loop")
        values = {"jaxpr": _values(inner)}
        return _jax.new_equation(eqn, evaluated_p, eqn.invars, eqn.outvars, values)

    return equations.map_equations(jaxpr, change, derives)


@ft.partial(jax.jit, static_argnums=0)
def _evaluated(jaxpr: _jax.Jaxpr, *values: jax.Array) -> list:
    return evaluated_p.bind(*values, jaxpr=jaxpr)


DERIVATIVE_ADVICE = (
    "Write a derivative (jax.custom_jvp), take none (jax.lax.stop_gradient), or leave the loop out "
    "with `only`."
)

ERROR_KINDS: dict[type, type[Exception]] = {
    kind: kind for kind in (NotImplementedError, TypeError, ValueError, RuntimeError)
}
ERROR_KINDS |= dict.fromkeys(
    (AssertionError, AttributeError, IndexError, KeyError), NotImplementedError
)
"""Errors that are raised again with another message, and their new types. JAX's own types hold more
than a message, and are left alone."""


def naming_the_loop(rule: Callable) -> Callable:
    """Return a rule whose errors name the loop, if it replaced a lax loop.

    An error in other code, such as a custom derivative rule, stays as it is, with a note.
    """

    @ft.wraps(rule)
    def named(*args: Any, **params: Any) -> Any:
        try:
            return rule(*args, **params)
        except Exception as error:
            loop = params["loop"]
            if not loop.replaced_by or _is_named(error):
                raise
            kind = ERROR_KINDS.get(type(error))
            if kind is None or not _jax.is_raised_within(error):
                error.add_note(f"loopkit.{loop.replaced_by}: this is in {_place(loop)}.")
                raise
            raise kind(_message(loop, error)) from error

    return named


def _is_named(error: Exception) -> bool:
    """Return whether an error already names a loop, such as an inner one."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return re.search(r"loopkit\.\w+: (this is )?in the (scan|while_loop) at", text) is not None


def _message(loop: Loop, error: Exception) -> str:
    own, text = re.match(r"loopkit\.\w+: ", str(error)), str(error)
    function, place = loop.replaced_by, f"in {_place(loop)}"
    if own is not None:
        return f"loopkit.{function}: {place}, which `only` can leave out: {text[own.end() :]}"
    why = text.split("\n")[0].rstrip(".") or type(error).__name__
    problem = f"{place}: the steps must have a derivative"
    return errors.message(function, problem, why, DERIVATIVE_ADVICE)


def _place(loop: Loop) -> str:
    return f"the {loop.name} at {_jax.source()}"
