"""Reading and rewriting jaxprs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._jax import Jaxpr, ShapedArray
from loopkit._slices import read_p

# ---------------------------------------------------------------- what an output is


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """For each output, the input that it passes on unchanged, if any."""
    j = _jax.open_jaxpr(jaxpr)
    place: dict[Any, int] = {v: i for i, v in enumerate(j.invars)}
    for eqn in j.eqns:
        if eqn.primitive is read_p and eqn.invars[0] in place:
            # A read passes its buffer on.
            place[eqn.outvars[-1]] = place[eqn.invars[0]]
    return [None if isinstance(v, _jax.Literal) else place.get(v) for v in j.outvars]


# ---------------------------------------------------------------- what is inside


def is_call(eqn: Any) -> bool:
    """Whether an equation does nothing but evaluate a jaxpr."""
    return eqn.primitive.name in ("jit", "pjit") and hasattr(eqn.params.get("jaxpr"), "eqns")


USED_UP = ("loopkit_forward", "loopkit_pullback")
"""Primitives that are derivatives already: of their custom rules, only the code is left."""


def holds_custom_vjp(jaxpr: Jaxpr) -> bool:
    """Whether a function with a custom VJP, and so without a JVP, is called anywhere inside."""

    def inside(value: Any) -> bool:
        if hasattr(value, "eqns"):
            return holds_custom_vjp(value)
        if isinstance(value, tuple):
            return any(map(inside, value))
        return bool(getattr(value, "holds_custom_vjp", False))

    return any(
        eqn.primitive.name.startswith("custom_vjp_call")
        or (eqn.primitive.name not in USED_UP and any(map(inside, eqn.params.values())))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
    )


def holds_while_loop(jaxpr: Jaxpr) -> bool:
    """Whether a loop is run anywhere inside that ends when its values say so."""

    def inside(value: Any) -> bool:
        if isinstance(value, tuple):
            return any(map(inside, value))
        if getattr(value, "cond", None) is not None:  # a loop of ours
            return True
        body = getattr(value, "body", value)
        return hasattr(body, "eqns") and holds_while_loop(body)

    return any(
        eqn.primitive.name == "while" or any(map(inside, eqn.params.values()))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
    )


def jaxpr_key(jaxpr: Jaxpr) -> Any:
    """A hashable key, equal for jaxprs that compute the same thing with the same equations."""
    j = _jax.open_jaxpr(jaxpr)
    names: dict[Any, int] = {}

    def atom(v: Any) -> Any:
        if isinstance(v, _jax.Literal):
            value = v.val
            content = value.tobytes() if hasattr(value, "tobytes") else repr(value)
            return ("literal", content, _type_key(v.aval))
        return names.setdefault(v, len(names))

    def parameter(value: Any) -> Any:
        if hasattr(value, "eqns"):
            return jaxpr_key(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(parameter, value))
        if isinstance(value, dict):
            return tuple((k, parameter(v)) for k, v in sorted(value.items()))
        if isinstance(value, _jax.DebugInfo):
            return None
        hash(value)
        return value

    head = tuple((atom(v), _type_key(v.aval)) for v in j.invars)
    eqns = tuple(
        (
            eqn.primitive,
            tuple(map(atom, eqn.invars)),
            tuple((atom(v), _type_key(v.aval)) for v in eqn.outvars),
            tuple((k, parameter(v)) for k, v in sorted(eqn.params.items())),
        )
        for eqn in j.eqns
    )
    return head, eqns, tuple(map(atom, j.outvars))


def _type_key(aval: Any) -> Any:
    return aval, getattr(aval, "weak_type", False)


# ---------------------------------------------------------------- the same, silent


def without_debug_effects(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr that no longer prints, nor calls what returns nothing.

    Recomputation runs a step again; what a step reports must be reported once.
    """
    return _jax.close_jaxpr(_without_debug_effects(_jax.open_jaxpr(jaxpr)))


def asks_the_host(jaxpr: Jaxpr) -> bool:
    """Whether it calls the host for values, which may be others the next time."""
    return any(isinstance(e, _jax.IO_EFFECTS) for e in without_debug_effects(jaxpr).effects)


def _without_debug_effects(jaxpr: Any) -> Any:
    if not jaxpr.effects:
        return jaxpr
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.debug_callback_p:
            continue
        if eqn.primitive.name == "debug_print":
            continue
        if eqn.primitive.name == "io_callback" and not eqn.outvars:
            continue
        if not eqn.effects:
            eqns.append(eqn)
            continue
        params = {k: _quiet_parameter(v) for k, v in eqn.params.items()}
        inner = _parameter_effects(params)
        effects = eqn.effects if inner is None else inner
        eqns.append(eqn.replace(params=params, effects=effects))
    effects = _jax.make_jaxpr_effects(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, eqns)
    return jaxpr.replace(eqns=eqns, effects=effects)


def _quiet_parameter(value: Any) -> Any:
    if hasattr(value, "without_debug_effects"):
        return value.without_debug_effects()
    if hasattr(value, "eqns"):
        quiet = _without_debug_effects(_jax.open_jaxpr(value))
        return quiet if type(quiet) is type(value) else _jax.close_jaxpr(quiet)
    if isinstance(value, tuple) and any(hasattr(v, "eqns") for v in value):
        return tuple(map(_quiet_parameter, value))
    return value


def _parameter_effects(params: dict[str, Any]) -> Any:
    found = [
        v
        for value in params.values()
        for v in (value if isinstance(value, tuple) else (value,))
        if hasattr(v, "eqns") or hasattr(v, "without_debug_effects")
    ]
    if not found or any(isinstance(e, _jax.JaxprInputEffect) for v in found for e in v.effects):
        return None
    return frozenset().union(*(v.effects for v in found))


# ---------------------------------------------------------------- the same, changed here and there


def map_equations(jaxpr: Jaxpr, change: Callable[[Any], Any]) -> Jaxpr:
    """A jaxpr with `change(equation)` for each equation, those inside others first.

    What does not change stays the same object, and what is shared stays shared.
    """
    done: dict[int, tuple[Any, Any]] = {}

    def inside(value: Any) -> Any:
        if isinstance(value, tuple):
            new = [inside(v) for v in value]
            if all(a is b for a, b in zip(new, value, strict=True)):
                return value
            return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
        if hasattr(value, "map_jaxprs"):
            return value.map_jaxprs(inside)
        if not hasattr(value, "eqns"):
            return value
        if id(value) not in done:
            done[id(value)] = value, changed(value)
        return done[id(value)][1]

    def changed(value: Any) -> Any:
        j = _jax.open_jaxpr(value)
        eqns = []
        for eqn in j.eqns:
            params = {k: inside(v) for k, v in eqn.params.items()}
            if any(params[k] is not v for k, v in eqn.params.items()):
                eqn = eqn.replace(params=params)
            eqns.append(change(eqn))
        if all(a is b for a, b in zip(eqns, j.eqns, strict=True)):
            return value
        new = j.replace(eqns=eqns)
        return new if j is value else value.replace(jaxpr=new)

    return inside(jaxpr)


def jaxprs_in(eqn: Any) -> Iterator[Any]:
    """The jaxprs that are parameters of an equation."""

    def inside(value: Any) -> Iterator[Any]:
        if isinstance(value, tuple):
            for v in value:
                yield from inside(v)
        elif hasattr(value, "map_jaxprs"):
            found = []
            value.map_jaxprs(lambda j: found.append(j) or j)
            yield from found
        elif hasattr(value, "eqns"):
            yield value

    return inside(tuple(eqn.params.values()))


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of a jaxpr and of all those in it, as often as they are run in a pass."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from all_equations(inner)


# ---------------------------------------------------------------- the same, varying


def vary_inputs(jaxpr: Jaxpr, marked: Sequence[bool], like: Sequence[ShapedArray]) -> Jaxpr:
    """A jaxpr whose marked inputs vary over the manual axes over which `like` does.

    What a jaxpr makes varying inside, its transpose sums over the devices inside: in a loop, once
    a step, which deadlocks if devices take different numbers of steps.
    """
    j = _jax.open_jaxpr(jaxpr)
    types = [
        _jax.type_like(v.aval, like) if mark else v.aval
        for v, mark in zip(j.invars, marked, strict=True)
    ]
    changed = [t != v.aval for t, v in zip(types, j.invars, strict=True)]
    if not any(changed):
        return jaxpr
    new, _ = _jax.trace(
        lambda *values: _evaluate_varying(j, values, changed, like), types, "varying"
    )
    return new


def _evaluate_varying(
    j: Any, values: Sequence[Any], changed: Sequence[bool], like: Sequence[ShapedArray]
) -> list:
    env = dict(zip(j.invars, values, strict=True))
    moved = {v for v, c in zip(j.invars, changed, strict=True) if c}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, _jax.Literal) else env[v]

    for eqn in j.eqns:
        ins = [read(v) for v in eqn.invars]
        touched = [not isinstance(v, _jax.Literal) and v in moved for v in eqn.invars]
        if not any(touched):
            outs = _jax.bind_equation(eqn, ins)
        elif eqn.primitive is _jax.pvary_p:
            outs = [_jax.vary_like(ins[0], [v.aval for v in eqn.outvars])]
        elif is_call(eqn):
            inner = _jax.open_jaxpr(eqn.params["jaxpr"])
            outs = _evaluate_varying(inner, ins, touched, like)
        else:
            outs = _jax.bind_equation(eqn, [_jax.vary_like(x, like) for x in ins])
        for v, out in zip(eqn.outvars, outs, strict=True):
            env[v] = out
            if jax.typeof(out) != v.aval:
                moved.add(v)
    return [read(v) for v in j.outvars]
