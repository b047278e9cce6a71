"""Reading and rewriting jaxprs."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import jax

from loopkit import _jax
from loopkit._buffers.slices import read_p


def forwarded(jaxpr: _jax.Jaxpr) -> list[int | None]:
    """Return, for each output, the input that it passes on unchanged, or None."""
    j = _jax.open_jaxpr(jaxpr)
    place: dict[Any, int] = {v: i for i, v in enumerate(j.invars)}
    for eqn in j.eqns:
        if eqn.primitive is read_p and eqn.invars[0] in place:
            # A read passes its buffer on.
            place[eqn.outvars[-1]] = place[eqn.invars[0]]
    return [None if isinstance(v, _jax.Literal) else place.get(v) for v in j.outvars]


def variables(eqn: _jax.Equation) -> list:
    """Return the variables that an equation reads, without literals."""
    return _jax.variables(eqn.invars)


def maker_of(j: _jax.OpenJaxpr) -> Callable[[Any], Any]:
    """Return a function from a variable of an open jaxpr to the equation that makes it, or None."""
    makers = {v: eqn for eqn in j.eqns for v in eqn.outvars}
    return lambda v: None if isinstance(v, _jax.Literal) else makers.get(v)


def source(v: _jax.Atom, maker: Callable[[Any], Any], passes: Callable[[Any], bool]) -> Any:
    """Return where a value comes from, through equations that pass their first operand on."""
    while (eqn := maker(v)) is not None and passes(eqn):
        v = eqn.invars[0]
    return v


def following_from(j: _jax.OpenJaxpr, known: Iterable[Any]) -> set:
    """Return the known variables, and those of an open jaxpr that depend on nothing else."""
    found = set(known)
    for eqn in j.eqns:
        if found.issuperset(variables(eqn)) and not eqn.effects:
            found.update(eqn.outvars)
    return found


def is_call(eqn: _jax.Equation) -> bool:
    """Return whether an equation does nothing but evaluate a jaxpr."""
    return eqn.primitive.name == "jit" and hasattr(eqn.params.get("jaxpr"), "eqns")


def is_remat(eqn: _jax.Equation) -> bool:
    """Return whether an equation calls a function under `jax.checkpoint`."""
    return _jax.name_of_primitive(eqn) in ("remat2", "RematTraced")


def called(eqn: _jax.Equation, ins: Sequence[Any]) -> tuple[Any, list]:
    """Return the open jaxpr of a call and its operands, constants (maybe NumPy arrays) first."""
    jaxpr = eqn.params["jaxpr"]
    return _jax.open_jaxpr(jaxpr), [*getattr(jaxpr, "consts", ()), *ins]


USED_UP = ("loopkit_forward", "loopkit_pullback")
"""Primitives that are derivatives already: the code of custom rules has replaced these rules."""


def holds_custom_vjp(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether any function inside has a custom VJP, and so no JVP."""
    return any(
        _jax.name_of_primitive(eqn).startswith(("custom_vjp_call", "CustomVJP"))
        or (eqn.primitive.name not in USED_UP and any(map(holds_custom_vjp, jaxprs_in(eqn))))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
    )


def holds_custom_jvp(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether any function inside has a custom JVP."""
    return any(map(_jax.has_custom_jvp, all_equations(jaxpr)))


def lax_loses_rules(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether second derivatives of a lax scan of these steps lose their custom rules."""
    return not _jax.SCAN_KEEPS_RULES and holds_custom_jvp(jaxpr)


def lax_loses_calls(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether derivatives of a lax scan of these steps lose callbacks without results."""
    return any(e.primitive.name == "io_callback" and not e.outvars for e in all_equations(jaxpr))


def holds_while_loop(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a loop inside has a predicate."""
    return any(
        eqn.primitive.name == "while" or getattr(eqn.params.get("loop"), "cond", None) is not None
        for eqn in all_equations(jaxpr)
    )


def run(
    eqns: Iterable[Any],
    env: dict,
    outs: Sequence[Any],
    rule: Callable[[Any, list], Sequence[Any]] = _jax.bind_equation,
    literal: Callable[[Any], Any] = lambda value: value,
) -> list:
    """Evaluate equations from the values in `env`, none of which is replaced; return `outs`."""
    read = lambda v: literal(v.val) if isinstance(v, _jax.Literal) else env[v]
    for eqn in eqns:
        made = rule(eqn, list(map(read, eqn.invars)))
        env |= {v: x for v, x in zip(eqn.outvars, made, strict=True) if v not in env}
    return list(map(read, outs))


def shows(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a loop inside shows its progress."""
    found = (eqn.params.get("loop") for eqn in all_equations(jaxpr))
    return any(getattr(loop, "progress", None) is not None for loop in found)


def unshown(jaxpr: _jax.Jaxpr, backward: bool) -> _jax.Jaxpr:
    """Return a jaxpr whose loops show no forward steps.

    With `backward`, they do not show the steps that they reverse either.
    """

    def hidden(eqn: Any) -> Any:
        loop = eqn.params.get("loop")
        new = loop.unshown(backward) if hasattr(loop, "unshown") else loop
        return eqn if new is loop else eqn.replace(params=eqn.params | {"loop": new})

    return map_equations(jaxpr, hidden, lambda eqn: "loop" in eqn.params)


def without_debug_effects(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr for steps that run again, without prints and callbacks that return nothing.

    Its loops show only the steps that they reverse.
    """

    def quiet(eqn: _jax.Equation) -> Any:
        reports = eqn.primitive is _jax.debug_callback_p or eqn.primitive.name == "debug_print"
        reports = reports or (eqn.primitive.name == "io_callback" and not eqn.outvars)
        return None if reports else eqn

    jaxpr = unshown(jaxpr, backward=False) if shows(jaxpr) else jaxpr
    return map_equations(jaxpr, quiet) if jaxpr.effects else jaxpr


def reported_once(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the tangents of a step, without reports from parts under `jax.checkpoint`.

    Those parts run again, and the step itself has reported already.
    """

    def quiet(eqn: _jax.Equation) -> Any:
        if not is_remat(eqn):
            return eqn
        silent = eqn.replace(params=with_jaxprs(eqn.params, without_debug_effects))
        return silent.replace(effects=_effects_inside(silent))

    return map_equations(jaxpr, quiet) if jaxpr.effects else jaxpr


def has_impure_callback(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr gets values from the host that may differ the next time."""
    return any(isinstance(e, _jax.IO_EFFECTS) for e in without_debug_effects(jaxpr).effects)


def inlined(jaxpr: _jax.Jaxpr, is_call: Callable[[Any], bool] = is_call) -> _jax.Jaxpr:
    """Return a jaxpr with calls of functions inlined; the same object if it has none."""

    def inside(eqn: _jax.Equation) -> Any:
        if not is_call(eqn) or _jax.is_laid_out(eqn):
            return None
        called = jaxprs_in(eqn)[0]
        constants = getattr(called, "consts", ()) or _jax.open_jaxpr(called).constvars
        return None if constants else called

    return expanded(jaxpr, inside)


def expanded(jaxpr: _jax.Jaxpr, inside: Callable[[Any], Any]) -> _jax.Jaxpr:
    """Return a jaxpr with each equation replaced by those of a jaxpr, `inside(equation)`.

    That has no constants. If it is None, the equation stays; if all stay, so does the jaxpr object.
    """
    j, eqns = _jax.open_jaxpr(jaxpr), []

    def expand(j: _jax.OpenJaxpr, names: dict, fresh: bool) -> list:
        """Append equations, in which variables have new names; `fresh` renames results too."""
        for eqn in j.eqns:
            invars = [renamed(v, names) for v in eqn.invars]
            if (made := inside(eqn)) is not None:
                made = _jax.open_jaxpr(made)
                outs = expand(made, dict(zip(made.invars, invars, strict=True)), True)
                names |= zip(eqn.outvars, outs, strict=True)
                continue
            if fresh:
                names |= zip(eqn.outvars, map(_jax.like, eqn.outvars), strict=True)
            outvars = [names[v] for v in eqn.outvars] if fresh else eqn.outvars
            eqns.append(eqn.replace(invars=invars, outvars=outvars) if names else eqn)
        return [renamed(v, names) for v in j.outvars]

    outvars = expand(j, {}, False)
    if len(eqns) == len(j.eqns) and all(a is b for a, b in zip(eqns, j.eqns, strict=True)):
        return jaxpr
    return _jax.close_jaxpr(_jax.with_equations(j, eqns, outvars=outvars))


def renamed(v: _jax.Atom, names: dict) -> Any:
    """Return a variable, or what stands for it in `names`; a literal stays as it is."""
    return v if isinstance(v, _jax.Literal) else names.get(v, v)


def map_equations(
    jaxpr: _jax.Jaxpr, change: Callable, as_it_is: Callable | None = None
) -> _jax.Jaxpr:
    """Return a jaxpr with `change(equation)` for each equation, inner ones first; None drops one.

    A jaxpr that does not change stays the same object, and a shared one stays shared. If `as_it_is`
    holds for an equation, its own jaxprs are left to `change`.
    """

    @ft.cache
    def changed(value: Any) -> Any:
        if hasattr(value, "map_jaxprs"):
            return value.map_jaxprs(changed)
        j = _jax.open_jaxpr(value)
        eqns = []
        for eqn in j.eqns:
            left = as_it_is is not None and as_it_is(eqn)
            params = eqn.params if left else with_jaxprs(eqn.params, changed)
            if any(params[k] is not v for k, v in eqn.params.items()):
                eqn = eqn.replace(params=_with_branches_alike(params))
                eqn = eqn.replace(effects=_effects_inside(eqn))
            eqns.append(change(eqn))
        if all(a is b for a, b in zip(eqns, j.eqns, strict=True)):
            return value
        eqns = [eqn for eqn in eqns if eqn is not None]
        effects = j.effects and _jax.make_jaxpr_effects(j.constvars, j.invars, j.outvars, eqns)
        new = _jax.with_equations(j, eqns, effects=effects)
        return new if j is value else value.replace(jaxpr=new)

    return changed(jaxpr)


def _with_branches_alike(params: dict[str, Any]) -> dict[str, Any]:
    """Give each branch of a `cond` the effects that are left in all its branches."""
    branches = params.get("branches", ())
    said = frozenset().union(*(b.effects for b in branches))
    left = frozenset().union(*(eqn.effects for b in branches for eqn in b.eqns))
    if said == left or any(isinstance(e, _jax.JaxprInputEffect) for e in said):
        return params

    def saying(branch: _jax.Jaxpr) -> Any:
        j = _jax.open_jaxpr(branch)
        new = j.replace(effects=left)
        return new if j is branch else branch.replace(jaxpr=new)

    return params | {"branches": tuple(map(saying, branches))}


def _effects_inside(eqn: _jax.Equation) -> Any:
    """Return the effects of an equation whose jaxprs have changed."""
    found = jaxprs_in(eqn) if eqn.effects else []
    if not found or any(isinstance(e, _jax.JaxprInputEffect) for j in found for e in j.effects):
        return eqn.effects
    return frozenset().union(*(j.effects for j in found))


def with_jaxprs(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return parameters of an equation, with `change(value)` for each jaxpr and loop in them."""

    def inside(value: Any) -> Any:
        if isinstance(value, tuple):
            new = [inside(v) for v in value]
            if all(a is b for a, b in zip(new, value, strict=True)):
                return value
            return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
        if _jax.is_object(value):
            return _jax.with_params(value, lambda params: with_jaxprs(params, change))
        holds = hasattr(value, "eqns") or hasattr(value, "map_jaxprs")
        return change(value) if holds else value

    return {k: inside(v) for k, v in params.items()}


def jaxprs_in(eqn: _jax.Equation) -> list:
    """Return the jaxprs that are parameters of an equation."""
    found: list = []

    def find(value: Any) -> Any:
        if hasattr(value, "map_jaxprs"):
            return value.map_jaxprs(find)
        found.append(value)
        return value

    with_jaxprs(eqn.params, find)
    return found


def all_equations(jaxpr: _jax.Jaxpr) -> Iterator[Any]:
    """Return the equations of a jaxpr and of all jaxprs inside, each as often as it occurs."""
    return (eqn for eqn, *_ in nested_equations(jaxpr))


def nested_equations(jaxpr: _jax.Jaxpr, around: tuple = ()) -> Iterator[tuple]:
    """Yield each equation together with the equations around it, the innermost first."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield (eqn, *around)
        for inner in jaxprs_in(eqn):
            yield from nested_equations(inner, (eqn, *around))


def meshes(jaxpr: _jax.Jaxpr) -> list:
    """Return the meshes that equations name and types do not."""
    named = lambda p: (p.get("mesh"), getattr(p.get("sharding"), "mesh", None))
    found = (mesh for eqn in all_equations(jaxpr) for mesh in named(eqn.params))
    found = (mesh for mesh in found if isinstance(mesh, jax.sharding.Mesh))
    return [mesh for mesh in found if jax.sharding.AxisType.Explicit not in mesh.axis_types]


def axis_names(jaxpr: _jax.Jaxpr, others: bool = False) -> set:
    """Return the axes of `jax.vmap` and of meshes that equations name.

    Not all equations show them as an effect. With `others`, only equations count that read values
    of other elements along the axis.
    """
    eqns = [e for e in all_equations(jaxpr) if not (others and e.primitive.name == "axis_index")]
    found = (eqn.params.get(key) for eqn in eqns for key in ("axes", "axis_name"))
    names = (name for v in found for name in (v if isinstance(v, (tuple, list)) else [v]))
    return {name for name in names if name is not None and not isinstance(name, Integral)}
