"""Jaxprs whose calls are replaced by what they evaluate, so that a cut sees what is inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopkit import _jax
from loopkit._jaxprs import equations


def inlined(jaxpr: _jax.Jaxpr, is_call: Callable[[Any], bool] = equations.is_call) -> _jax.Jaxpr:
    """Return a jaxpr without calls of jitted or other functions; the same object if it has none."""

    def can_be(eqn: _jax.Equation) -> bool:
        inside = equations.jaxprs_in(eqn)[0] if is_call(eqn) else None
        return inside is not None and not _has_constants(inside) and not _jax.is_laid_out(eqn)

    j = _jax.open_jaxpr(jaxpr)
    if not any(map(can_be, j.eqns)):
        return jaxpr
    eqns, env = _spelled_out(j, {}, can_be)
    outvars = [_looked_up(v, env) for v in j.outvars]
    return _jax.close_jaxpr(j.replace(eqns=eqns, outvars=outvars))


def _has_constants(jaxpr: _jax.Jaxpr) -> bool:
    return bool(getattr(jaxpr, "consts", ()) or _jax.open_jaxpr(jaxpr).constvars)


def _looked_up(v: _jax.Atom, env: dict) -> Any:
    return v if isinstance(v, _jax.Literal) else env.get(v, v)


def _spelled_out(
    j: _jax.OpenJaxpr, env: dict, can_be: Callable[[Any], bool], fresh: bool = False
) -> tuple[list, dict]:
    """Return the equations, and the value of each replaced variable; `fresh` renames results."""
    eqns: list = []
    for eqn in j.eqns:
        invars = [_looked_up(v, env) for v in eqn.invars]
        if can_be(eqn):
            inside = _jax.open_jaxpr(equations.jaxprs_in(eqn)[0])
            given = dict(zip(inside.invars, invars, strict=True))
            more, within = _spelled_out(inside, given, can_be, True)
            eqns += more
            results = (_looked_up(v, within) for v in inside.outvars)
            env |= dict(zip(eqn.outvars, results, strict=True))
            continue
        outvars = list(map(_jax.like, eqn.outvars)) if fresh else eqn.outvars
        env |= dict(zip(eqn.outvars, outvars, strict=True)) if fresh else {}
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return eqns, env
