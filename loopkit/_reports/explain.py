"""`explain`: what the loops inside a function store, and what they run again."""

from __future__ import annotations

import functools as ft
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.errors import size
from loopkit._engine.derivative.reversal import remat_nanoseconds, reversal
from loopkit._engine.derivative.split import split_step
from loopkit._engine.facts.activity import whole_activity
from loopkit._engine.lanes.many_lanes import why_never, why_waiting
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.leaves import spread
from loopkit._engine.loop import CarryLeaf, Const, Input, Loop, Output, kept
from loopkit._engine.primitives import evaluated_p, narrowed_p, while_p
from loopkit._engine.rules import narrowed
from loopkit._foreign.lax_loop import LeftLoop, left_within
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import nanoseconds
from loopkit._plans.budget import Bytes, stores_every_step
from loopkit._plans.plan import Plan
from loopkit._plans.planner import make_plan
from loopkit._reports.memory import (
    Frontier,
    GradientBytes,
    frontier_of,
    gradient_bytes,
    is_budgeted,
)

A_LITTLE_MORE = 1.5
"""The multiple of a budget that `explain` also plans for, to say what that would save."""


@dataclass(frozen=True)
class Explained:
    """One loop inside a function."""

    name: str
    """The name of the function that the user called: "loopkit.scan", "lax.scan", ..."""
    source: str
    """"file:line" of the call."""
    plan: Plan
    """The loop's plan; for a loop of lax, a plan that stores every step."""
    scan_bytes: int | None
    """The bytes that jax.lax.scan would store in all; None if nothing bounds the loop."""
    lanes: tuple[int, ...] = ()
    """The sizes of vmapped axes whose lanes wait for each other, since their predicates differ."""

    waits: str = ""
    """Why the lanes wait, if loopkit chose that."""
    frontier: Frontier | None = None
    """The choices of what to keep of a step, with the time to run the rest again."""
    again: float = 0.0
    """The share of a step's time that its reversal runs again, besides whole runs."""
    gradient: bool = True
    """Whether its steps and settings allow a gradient."""
    with_more: Plan | None = None
    """The plan in a little more memory, if that at least halves the steps that run again."""

    @property
    def row(self) -> tuple[str, ...]:
        plan = self.plan
        steps = "no bound" if plan.bound is None else f"{plan.bound:,}"
        if plan.bound is not None and not plan.exact:
            steps = f"<= {steps}"
        if not self.name.startswith("loopkit") or not self.gradient:
            stored = "every step" if self.gradient and self.name == "lax.scan" else "no gradient"
            peak, runs = "", (None, None) if plan.bound is None else (plan.bound, 0)
        else:
            stored, peak = plan.stored, size(plan.peak_bytes)
            runs = (None, None) if plan.bound is None else plan.evaluations()
        forward, backward = ("" if r is None else f"{r:,}" for r in runs)
        parts = round((plan.bound or 0) * self.again)
        if parts and runs[1] is not None:
            backward = f"about {runs[1] + parts:,}"
        of_step = size(plan.step.carry_bytes), size(plan.step.residual_bytes)
        as_scan = "" if self.scan_bytes is None else size(self.scan_bytes)
        lanes = "".join(f" x {n}" for n in self.lanes).replace(" x", ",", 1)
        name = f"{self.name}{lanes} lanes" if lanes else self.name
        return (name, self.source, steps, *of_step, stored, peak, forward, backward, as_scan)

    @property
    def cliff(self) -> list[str]:
        """Return a line that says what a little more memory would save."""
        if self.with_more is None:
            return []
        runs = [p.evaluations()[1] for p in (self.with_more, self.plan)]
        saved = "{:,} whole runs backward, not {:,}".format(*runs)
        return [f"with a peak of {size(self.with_more.peak_bytes)}, {self.source}: {saved}"]

    @property
    def on_gpu(self) -> list[str]:
        """Return lines that say what is different on a GPU."""
        plan = self.plan.on_gpu
        if plan == self.plan or not self.name.startswith("loopkit") or not self.gradient:
            return []
        runs = ""
        if plan.bound is not None:
            runs = ", {:,} runs forward, {:,} backward".format(*plan.evaluations())
        return [f"on a GPU, {self.source}: {plan.stored}{runs}"]


HEADER = ("loop", "source", "steps", "carry", "residuals", "stored", "peak")
HEADER += ("runs forward", "backward", "as lax.scan")


@dataclass(frozen=True)
class Explanation:
    """The loops of a function, in the order in which it calls them. It prints as a table."""

    loops: tuple[Explained, ...]
    program: Any = field(repr=False, compare=False)
    """The traced function."""
    left: tuple[LeftLoop, ...] = ()
    """The loops that `checkpointed` or `replace_lax_loops` leaves to lax, each with a `site`, a
    `LoopSite`, and the reason, `why`."""

    @ft.cached_property
    def gradient(self) -> GradientBytes:
        """The memory of the gradient in all arguments: the predicted `peak`, the `holders` of these
        bytes, the `timeline` of all bytes, and `compiled`, the compiler's figure, for which the
        gradient is compiled."""
        return gradient_bytes(self.program)

    @ft.cached_property
    def _budgeted(self) -> bool:
        return is_budgeted(self.program)

    def __len__(self) -> int:
        return len(self.loops)

    def __getitem__(self, place: int) -> Explained:
        return self.loops[place]

    @property
    def plan(self) -> Plan:
        """The plan of the only loop of loopkit. A loop accepts it as `checkpoints`; change it with
        `dataclasses.replace`. A scan that stores every step runs as lax's, and is not counted."""
        found = [e.plan for e in self.loops if e.name.startswith("loopkit")]
        if len(found) != 1:
            expected = "must run one loop of loopkit to have a `plan`"
            advice = "Choose one of several loops, as in `explain(...)[0].plan`."
            raise errors.wrong_value("explain", "fn", expected, f"{len(found)} loops", advice)
        return found[0]

    def __str__(self) -> str:
        if not self.loops:
            return f"no loops\n{self.gradient}" if self._budgeted else "no loops"
        rows = [HEADER, *(loop.row for loop in self.loops)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        lines += [f"lanes that wait, {e.source}: they {e.waits}" for e in self.loops if e.waits]
        lines += [f"to keep of a step, {e.source}: {e.frontier}" for e in self._with_frontiers]
        lines += [line for loop in self.loops for line in (*loop.on_gpu, *loop.cliff)]
        lines += [str(self.gradient)] if self._budgeted else []
        lines += [f"left to lax, {os.path.basename(e.site.source)}: {e.why}" for e in self.left]
        return "\n".join(line.rstrip() for line in lines)

    @property
    def _with_frontiers(self) -> list[Explained]:
        return [e for e in self.loops if e.frontier is not None and e.frontier.choices]

    def plot(self, steps: int | None = None) -> list[Any]:
        """Draw each loop of loopkit as `Plan.plot` does, the frontiers, and the bytes over time."""
        figures = [e.plan.plot(steps) for e in self.loops if e.name.startswith("loopkit")]
        figures += [e.frontier.plot() for e in self._with_frontiers if e.frontier]
        return [*figures, self.gradient.plot()] if self._budgeted else figures


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain what the loops inside `fn` store for a gradient, and how much they run again.

    Nothing runs: `explain` traces `fn` on the types of its arguments.

    **Arguments:**

    - `fn`: a function that calls loops, of loopkit or of lax, at any depth.
    - `args`, `kwargs`: its arguments, or `jax.ShapeDtypeStruct`s. Arrays become abstract, and
      so do arguments that are floats or complex numbers. `fn` gets other leaves as they are.

    **Returns:**

    An `Explanation`: a sequence with an entry for each loop, which has the loop's `plan`. If there
    is one loop, `plan` of the whole is its plan. It prints as a table, with a line for each loop,
    or, if `fn` is a gradient, for each half of a loop, forward and backward. `carry` and
    `residuals` are the bytes of one step. `peak` is the prediction of what the gradient of the loop
    needs beyond that of one step. `runs` count evaluations of the body, with "about" if parts of
    steps run again. The last column has the bytes that `jax.lax.scan` would store. The table is
    for loops in which more than a single number moves: the gradient of others stores nothing.

    Lines below the table say:

    - why lanes wait, if `lanes` is None;
    - how many bytes of a step may be kept, and how long the rest then takes to run again, with the
      choice that is taken in brackets;
    - which plan a loop follows on a GPU, if that is another;
    - which peak would halve the runs backward, if it is at most half as much again as the budget;
    - the peak of the gradient and what holds most of it, if a budget in bytes plans loops or has
      code run again;
    - why `loopkit.checkpointed` or `loopkit.replace_lax_loops` leaves a loop to lax.

    **Raises:** `TypeError` if `fn` is not callable.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def loss(x):
            step = lambda x, _: (jnp.sin(x), None)
            return jnp.sum(loopkit.scan(step, x, length=1000)[0])

        str(loopkit.explain(loss, jnp.ones(50)))
        ```
    """
    validate.check_callable("explain", "fn", fn)
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [
        t or isinstance(v, jax.ShapeDtypeStruct)
        for v, t in zip(leaves, validate.are_traced(args, kwargs), strict=True)
    ]

    def flat(*values: jax.Array) -> Any:
        args, kwargs = tree.unflatten(spread(values, traced, leaves))
        return list(filter(validate.is_traced, jax.tree.leaves(fn(*args, **kwargs))))

    def trace() -> Any:
        with _jax.scan_as_primitive():
            return jax.make_jaxpr(flat)(*kept(leaves, traced))

    jaxpr = spelled_out(trace())
    seen: set[int] = set()
    found = []
    for eqn, *around in equations.nested_equations(jaxpr):
        source = _source(eqn, *around)
        loop = eqn.params.get("loop")
        if isinstance(loop, Loop):
            if id(eqn) not in seen:
                seen.add(id(eqn))
                found.append(_of_loopkit(source, loop))
        elif eqn.primitive.name in ("scan", "while"):
            found.append(_of_lax(source, eqn))
    of_lax = any(e.name.startswith("lax") for e in found)
    return Explanation(tuple(found), jaxpr, left_within(trace) if of_lax else ())


def spelled_out(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr with each loop that narrows its lanes expanded into the loops that run."""

    def in_phases(eqn: _jax.Equation) -> Callable | None:
        """Return the function that runs an equation's phases; None if it has none."""
        if eqn.primitive is narrowed_p:
            return ft.partial(narrowed.evaluate, **eqn.params)
        phases = phases_of(eqn.params["loop"]) if eqn.primitive is while_p else None
        return None if phases is None else phases.run

    def change(eqn: _jax.Equation) -> Any:
        run = in_phases(eqn)
        if run is None:
            return eqn
        inner = spelled_out(_jax.trace_closed(run, [v.aval for v in eqn.invars], "loop_phases"))
        return _jax.new_equation(eqn, evaluated_p, eqn.invars, eqn.outvars, {"jaxpr": inner})

    return equations.map_equations(jaxpr, change, in_phases)


def _source(*eqns: _jax.Equation) -> str:
    """Return the source line of an equation or, if it has none, of the nearest one around it.

    Equations of loops that were spelled out have no source line."""
    out = max((i for i, eqn in enumerate(eqns) if eqn.primitive is evaluated_p), default=0)
    found = next(filter(None, map(_jax.source_of, eqns[out:])), None)
    return "?" if found is None else f"{os.path.basename(found[0])}:{found[1]}"


def _of_loopkit(source: str, loop: Loop) -> Explained:
    if loop.length is None and stores_every_step(loop.checkpoints):
        bare = _with_bytes(Plan(1), _jax.byte_count(*loop.carry_types), 0)
        return Explained(f"loopkit.{loop.name}", source, bare, None, gradient=False)
    active = whole_activity(loop)
    how = reversal(loop, active)
    whole = None if loop.length is None else loop.length * how.split.uncut_bytes
    name, waits = f"loopkit.{loop.name}", _why_waiting(loop) if loop.lanes else ""
    frontier, again = frontier_of(loop, active, how.plan), 0.0
    if (run := nanoseconds(loop.body, loop.device)) > 0:
        hidden = 0.0 if how.split.variant == "opened" else remat_nanoseconds(loop)
        again = (how.plan.row.nanoseconds + hidden) / run
    more = _with_more(loop, how.plan)
    return Explained(name, source, how.plan, whole, loop.lanes, waits, frontier, again, True, more)


def _with_more(loop: Loop, plan: Plan) -> Plan | None:
    """Return the plan in a little more memory, if that at least halves the runs backward."""
    budget, bound = loop.checkpoints, plan.bound
    if not isinstance(budget, Bytes) or budget.host is not None or bound is None:
        return None
    budget = replace(budget, count=int(A_LITTLE_MORE * budget.count))
    more, runs = make_plan(budget, bound, plan.exact, plan.step, loop.name), plan.evaluations()[1]
    return more if runs and 2 * more.evaluations()[1] <= runs else None


def _why_waiting(loop: Loop) -> str:
    """Return why a loop's lanes wait, if loopkit chose that."""
    if loop.lane_policy not in (None, "flatten"):
        return ""
    if (lane := loop.lane) is not None:
        return why_waiting(lane.loop, lane.count)
    return why_never(loop) or "read each other, or have derivatives one by one"


def _of_lax(source: str, eqn: _jax.Equation) -> Explained:
    """Describe a loop of lax, and what its gradient would store, if it has one."""
    params = eqn.params
    if eqn.primitive.name == "while":
        carry = params["body_jaxpr"].in_avals[params["body_nconsts"] :]
        size = _jax.byte_count(*carry)
        return Explained("lax.while_loop", source, _with_bytes(Plan(1), size, 0), None)
    consts, carries = _jax.scan_counts(params)
    xs, ys = len(eqn.invars) - consts - carries, len(eqn.outvars) - carries
    records = (Const(),) * consts, (CarryLeaf(),) * carries, (Input(),) * xs, (Output(),) * ys
    length = params["length"]
    loop = Loop(None, params["jaxpr"], 0, *records, length, name="scan")
    bounded, carry = Plan(1, bound=length, exact=True), _jax.byte_count(*loop.carry_types)
    try:
        stored = split_step(loop, whole_activity(loop)).uncut_bytes
    except (TypeError, ValueError, NotImplementedError):
        bare = _with_bytes(bounded, carry, 0)
        return Explained("lax.scan", source, bare, None, gradient=False)
    plan = _with_bytes(bounded, carry, stored)
    again = remat_nanoseconds(loop) / (nanoseconds(loop.body, loop.device) or 1.0)
    return Explained("lax.scan", source, plan, length * stored, again=again)


def _with_bytes(bare: Plan, carry: int, residuals: int) -> Plan:
    step = bare.step._replace(carry_bytes=carry, residual_bytes=residuals)
    return replace(bare, step=step)
