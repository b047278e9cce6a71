"""Jaxprs whose calls are replaced by what they evaluate, so that a cut sees what is inside."""

from __future__ import annotations

from typing import Any

from loopkit import _jax
from loopkit._jaxprs import equations


def inlined(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """A jaxpr without calls of jitted functions; the same object if it has none."""
    j = _jax.open_jaxpr(jaxpr)
    if not any(map(_can_be_inlined, j.eqns)):
        return jaxpr
    eqns, env = _spelled_out(j, {})
    outvars = [_looked_up(v, env) for v in j.outvars]
    return _jax.close_jaxpr(j.replace(eqns=eqns, outvars=outvars))


def _can_be_inlined(eqn: _jax.Equation) -> bool:
    if not equations.is_call(eqn) or getattr(eqn.params["jaxpr"], "consts", ()):
        return False
    return not _jax.open_jaxpr(eqn.params["jaxpr"]).constvars


def _looked_up(v: _jax.Atom, env: dict) -> Any:
    return v if isinstance(v, _jax.Literal) else env.get(v, v)


def _spelled_out(j: _jax.OpenJaxpr, env: dict, fresh: bool = False) -> tuple[list, dict]:
    """The equations, and what stands for which variable; with `fresh` results, all are new."""
    eqns: list = []
    for eqn in j.eqns:
        invars = [_looked_up(v, env) for v in eqn.invars]
        if _can_be_inlined(eqn):
            inside = _jax.open_jaxpr(eqn.params["jaxpr"])
            more, within = _spelled_out(inside, dict(zip(inside.invars, invars, strict=True)), True)
            eqns += more
            results = (_looked_up(v, within) for v in inside.outvars)
            env |= dict(zip(eqn.outvars, results, strict=True))
            continue
        outvars = list(map(_jax.like, eqn.outvars)) if fresh else eqn.outvars
        env |= dict(zip(eqn.outvars, outvars, strict=True)) if fresh else {}
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return eqns, env
