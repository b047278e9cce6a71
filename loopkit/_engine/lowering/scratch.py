"""Allocate the memory that inner loops write to once, outside all loops, in programs on a CPU.

An inner loop may begin with uninitialised arrays. A custom call makes such an array, and XLA does
not compile a loop with a call in it as one kernel. So the outer loop carries the array, its
scratch, from step to step: each step overwrites what the step before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import parts
from loopkit._jaxprs import equations
from loopkit._jaxprs.equations import renamed

FILLED = 1 << 12
"""The most bytes that a step fills with zeros rather than carrying them. Filling takes a tenth of a
microsecond, and an array of zeros needs no memory if it is not used."""


def with_scratch(evaluate: Callable) -> Callable:
    """Return a function like `evaluate`, which returns a list, that allocates nothing in loops."""

    def evaluated(*operands: jax.Array, **params: Any) -> list:
        within = params["jaxpr"] if "jaxpr" in params else params["loop"].body
        if not _runs_loops(within):
            return evaluate(*operands, **params)
        types = list(map(jax.typeof, operands))
        jaxpr, closed = _jax.trace(lambda *v: evaluate(*v, **params), types, "loop")
        rewritten, _ = _lifted(jaxpr, inside=False)
        return list(_jax.call_jaxpr(rewritten)(*closed, *operands))

    return evaluated


def _runs_loops(jaxpr: _jax.Jaxpr) -> bool:
    return any(eqn.primitive in _jax.evaluations for eqn in equations.all_equations(jaxpr))


def _is_of_interest(eqn: _jax.Equation) -> bool:
    return eqn.primitive in _jax.evaluations or _is_blank(eqn)


def _is_blank(eqn: _jax.Equation) -> bool:
    kind = eqn.params
    return eqn.primitive is _jax.blank_p and kind["found"] and not kind["host"]


def _lifted(jaxpr: _jax.Jaxpr, inside: bool) -> tuple[_jax.Jaxpr, list]:
    """Return a jaxpr whose loops allocate nothing, and the types of its scratch.

    A jaxpr `inside` a loop allocates nothing itself: its last inputs are the scratch, and its last
    outputs are the scratch as it leaves it.
    """
    if not any(map(_is_of_interest, equations.all_equations(jaxpr))):
        return jaxpr, []
    level = _Level(_jax.open_jaxpr(equations.expanded(jaxpr, _called)), inside)
    for at, eqn in enumerate(level.j.eqns):
        level.add(at, eqn)
    return level.jaxpr(), [v.aval for v in level.inputs]


def _called(eqn: _jax.Equation) -> _jax.Jaxpr | None:
    """Return the jaxpr of a loop, or of a call that holds loops, with variables of its own."""
    evaluate, types = _jax.evaluations.get(eqn.primitive), [v.aval for v in eqn.invars]
    if evaluate is not None:
        return _jax.trace_closed(lambda *v: evaluate(*v, **eqn.params), types, "loop")
    inner = None
    if equations.is_call(eqn):
        inner = eqn.params["jaxpr"]
    elif eqn.primitive.name.startswith("custom_"):  # its rules are not needed any more
        inner = eqn.params.get("call_jaxpr")
    if inner is None or not _runs_loops(inner):
        return None
    return _jax.trace_closed(_jax.call_jaxpr(inner), types, "loop")


class _Level:
    """The equations of one jaxpr, rewritten in order."""

    def __init__(self, j: _jax.OpenJaxpr, inside: bool):
        self.j, self.inside = j, inside
        self.eqns: list = []
        self.names: dict = {}
        self.inputs: list = []
        """The scratch that is an input."""
        self.latest: list = []
        """The variable that holds each scratch after the last write to it."""
        self.taken: set = set()
        """The scratch that the current equation uses already."""

    def add(self, at: int, eqn: _jax.Equation) -> None:
        self.taken = set()
        if self.inside and _is_blank(eqn) and _jax.byte_count(eqn.outvars[0].aval) > FILLED:
            out = eqn.outvars[0]
            self.names[out] = self.scratch(at, out.aval)
            return
        eqn = eqn.replace(invars=[renamed(v, self.names) for v in eqn.invars])
        if eqn.primitive not in (_jax.lax_while_p, _jax.lax_scan_p):
            self.append(eqn)
            return
        step, types = _lifted(_jax.steps_of(eqn.params), inside=True)
        if not types:
            self.append(eqn.replace(params=_jax.with_steps(eqn.params, step)))
            return
        scratch = [self.scratch(at, t) for t in types]
        operands = [*eqn.invars, *scratch]
        loop = lambda *values: _loop(eqn, step, *parts(values, len(eqn.invars)))
        made = _jax.trace_closed(loop, [v.aval for v in operands], "loop")
        outs = self.splice(_jax.open_jaxpr(made), operands)
        self.names.update(zip(eqn.outvars, outs, strict=False))

    def splice(self, j: _jax.OpenJaxpr, operands: Sequence[Any] = ()) -> list:
        """Append the equations of a jaxpr with variables of its own, and return its outputs."""
        names = dict(zip(j.invars, operands, strict=True))
        for eqn in j.eqns:
            self.append(eqn.replace(invars=[renamed(v, names) for v in eqn.invars]))
        return [renamed(v, names) for v in j.outvars]

    def append(self, eqn: _jax.Equation) -> None:
        self.eqns.append(eqn)
        for i, last in enumerate(self.latest):
            place = next((k for k, v in enumerate(eqn.invars) if v is last), None)
            if place is not None:
                self.latest[i] = _written(eqn, place) or last

    def scratch(self, at: int, aval: _jax.ShapedArray) -> Any:
        """Return scratch of a type for equation `at`; make it only if none is free."""
        for i, last in enumerate(self.latest):
            if i not in self.taken and _jax.same_type(last.aval, aval) and not self.reads(at, last):
                self.taken.add(i)
                return last
        read = [] if self.inside else equations.variables(self.j.eqns[at])
        after = _jax.variables(renamed(v, self.names) for v in read)
        make = lambda *values: [_jax.blank(aval, _jax.moment(values))]
        made = _jax.open_jaxpr(_jax.trace_closed(make, [v.aval for v in after], "scratch"))
        new = made.outvars[0]
        if self.inside:
            self.inputs.append(new)
        else:
            self.splice(made, after)
        self.taken.add(len(self.latest))
        self.latest.append(new)
        return new

    def reads(self, at: int, value: _jax.Var) -> bool:
        """Return whether an equation from `at` on reads a value, or the value is a result."""
        read = (v for eqn in self.j.eqns[at:] for v in eqn.invars)
        return any(renamed(v, self.names) is value for v in (*read, *self.j.outvars))

    def jaxpr(self) -> _jax.Jaxpr:
        outs = [renamed(v, self.names) for v in self.j.outvars]
        if self.inside:
            outs += self.latest
        ins = [*self.j.invars, *self.inputs]
        effects = _jax.make_jaxpr_effects(self.j.constvars, ins, outs, self.eqns)
        changes: Any = {"invars": ins, "outvars": outs, "effects": effects}
        new = _jax.with_equations(self.j, self.eqns, **changes)
        return _jax.close_jaxpr(new)


def _written(eqn: _jax.Equation, place: int) -> Any:
    """Return the result that takes over the memory of an operand; None if none does."""
    name, operand = eqn.primitive.name, eqn.invars[place]
    if eqn.primitive is _jax.lax_while_p:
        at = place - eqn.params["cond_nconsts"] - eqn.params["body_nconsts"]
    elif eqn.primitive is _jax.lax_scan_p:
        at = place - _jax.scan_counts(eqn.params)[0]
    elif name == "optimization_barrier":
        at = place
    else:
        at = 0 if name == "select_n" or (name == "dynamic_update_slice" and place == 0) else -1
    out = eqn.outvars[at] if 0 <= at < len(eqn.outvars) else None
    return out if out is not None and _jax.same_type(out.aval, operand.aval) else None


def _loop(eqn: _jax.Equation, step: _jax.Jaxpr, operands: list, scratch: list) -> list:
    """Run a loop of lax with a step that takes scratch, too; return results and scratch."""
    run, params = _jax.call_jaxpr(step), eqn.params
    if eqn.primitive is _jax.lax_while_p:
        counts = params["cond_nconsts"], params["body_nconsts"]
        asked, fixed, init = parts(operands, *counts)
        another = _jax.call_jaxpr(params["cond_jaxpr"])

        def body(s: list) -> list:
            return list(run(*fixed, *s))

        with _jax.context_of(eqn):
            goes_on = lambda s: another(*asked, *s[: len(init)])[0]
            return lax.while_loop(goes_on, body, [*init, *scratch])
    count, carried = _jax.scan_counts(params)
    fixed, init, xs = parts(operands, count, carried)

    def of_row(s: list, x: list) -> tuple[list, list]:
        outs = run(*fixed, *s[:carried], *x, *s[carried:])
        new, y, left = parts(outs, carried, len(outs) - carried - len(scratch))
        return [*new, *left], y

    how = {k: params[k] for k in ("length", "reverse", "unroll")}
    with _jax.context_of(eqn), _jax.scan_as_primitive():
        done, ys = lax.scan(of_row, [*init, *scratch], xs, **how)
    return [*done[:carried], *ys, *done[carried:]]
