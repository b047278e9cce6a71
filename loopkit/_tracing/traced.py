"""`Traced`: a loop, what its functions close over, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import lax

from loopkit import _jax
from loopkit._engine import steps
from loopkit._engine.facts.bounds import asked, bound_of, limits_in, of_all_steps, of_length
from loopkit._engine.facts.ranges import with_ranges
from loopkit._engine.leaves import Const, Input, Operands, Output
from loopkit._engine.loop import Loop, parts
from loopkit._engine.passes import ready
from loopkit._engine.passes.rewritten import run
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._programs.cache import shared
from loopkit._progress.progress import ProgressSettings
from loopkit._tracing import references
from loopkit._tracing.axes import stacks
from loopkit._types import Axes


@dataclass(frozen=True)
class Traced:
    """The two functions of a loop, and what they close over."""

    loop: Loop
    """As it is written."""
    cond_consts: list
    consts: list
    carry_types: list
    """Types of the carry leaves, as the steps take them."""
    init_types: list
    """Types that they begin with: strong from the beginning where a step leaves them strong."""
    y_tree: Any = None
    references: Sequence[Any] = ()
    """What they read and write, made outside: leaves behind those of the carry."""

    @property
    def closed_over(self) -> list:
        return [*self.cond_consts, *self.consts, *self.references]

    def closing_over(self, values: list) -> Traced:
        """Return the same functions, over other values of the same types."""
        cond_consts, consts, held = parts(values, len(self.cond_consts), len(self.consts))
        return replace(self, cond_consts=cond_consts, consts=consts, references=held)

    def of_length(self, length: int) -> Traced:
        """Return the same loop with another length."""
        return replace(self, loop=of_length(self.loop, length))

    def showing(self, progress: ProgressSettings) -> Traced:
        """Return the same loop, which shows in another way how far it is."""
        make = lambda: shared(self.loop.replace(progress=progress))
        return replace(self, loop=self.loop.derived(progress, make))

    def bounded(self, init: Sequence[Any]) -> Traced:
        """Return the same loop, with the bound that its predicate has if it starts from `init`."""
        loop, most = self.loop, steps.LAST_STEP if self.loop.length is None else self.loop.length
        if loop.cond is None:
            return self
        limits = limits_in(loop)
        if not limits.found:
            return self
        init = [*init, *references.read(self.references)]
        bound = bound_of(limits, asked(loop, Operands(self.cond_consts, self.consts, init, [])))
        if bound is None or bound.steps > most or not bound.is_planned_for(loop.checkpoints):
            return self
        values = map(_jax.innermost, (*self.cond_consts, *self.consts, *init))
        if not any(map(_jax.is_tracer, values)):
            # Outside jit there is a program for each bound: a few will do.
            few = 1 << max(0, bound.steps - 1).bit_length()
            return self.of_length(min(most, few if loop.progress is None else bound.steps))
        if not bound.exact:
            return self.of_length(bound.steps)
        return replace(self, loop=of_all_steps(loop, bound.steps), cond_consts=[])

    def stacked(self, out_axes: Axes) -> Traced:
        """Return the loop with its ys stacked where they will be, if they are not moved after."""
        _, places = stacks(self.y_tree, self.loop.ys_types, out_axes)
        if not any(places):
            return self
        make = lambda: shared(self.loop.replace(ys=tuple(map(Output, places))))
        return replace(self, loop=self.loop.derived(("ys", places), make))

    def run(self, init: Sequence[Any], xs: Sequence[Any], split: bool | None = None) -> tuple:
        """Run the loop: the leaves of the final carry and of ys.

        `split`: unless None, it runs as the scan of lax, with `_split_transpose` if it is True.
        """
        types, count = self.init_types if split is None else self.carry_types, len(init)
        init = [*init, *references.read(self.references)] if self.references else list(init)
        loop = with_ranges(self.loop, Operands(self.cond_consts, self.consts, init, list(xs)))
        loop, passes = ready(loop)
        # One that was flattened is no scan any more.
        as_lax = split is not None and loop.cond is None
        bind = partial(_lax_scan, split=split) if as_lax else while_p.bind
        meshes = loop.derived("meshes", lambda: equations.meshes(loop.body))
        bound = lambda *operands: bind(*_jax.known_on(meshes, list(operands)), loop=loop)
        first = [_convert(v, t) for v, t in zip(init, types, strict=True)]
        operands = [*self.cond_consts, *self.consts, *first, *xs]
        final, held, ys = parts(run(bound, passes, operands), count, len(self.references))
        if held:
            references.write(self.references, held)
        return final, ys


@partial(jax.jit, static_argnames=("loop", "split"), inline=True)
def _lax_scan(*operands: jax.Array, loop: Loop, split: bool) -> list:
    """Run the scan of lax, which stores the residuals of every step, of the step as traced."""
    given, _ = loop.split(operands)
    if loop.length == 0:  # which lax refuses where nothing is traced
        return steps.evaluate(loop, given)
    return steps.scan(loop, given, split)


def _convert(value: jax.Array, aval: _jax.ShapedArray) -> Any:
    """Return an initial value in the type that the loop carries."""
    have = jax.typeof(value)
    if have.dtype != aval.dtype or (have.weak_type and not aval.weak_type):
        value = lax.convert_element_type(value, aval.dtype)
    return _jax.vary_like(value, [aval])


def as_loop(
    cond: _jax.Jaxpr | None,
    cond_consts: list,
    body: _jax.Jaxpr,
    consts: list,
    carry: list,
    types: list,
    settings: dict,
) -> Traced:
    """Make a loop of two jaxprs. `settings`: its other fields."""
    n, c = len(types), len(consts)
    settings = {"xs": (Input(),) * (len(body.in_avals) - c - n), **settings}
    ys, constants = (Output(),) * (len(body.out_avals) - n), (Const(),) * c
    loop = Loop(cond, body, len(cond_consts), constants, tuple(carry), ys=ys, **settings)
    pairs = zip(types, loop.carry_types, strict=True)
    first = [a.update(weak_type=a.weak_type and b.weak_type) for a, b in pairs]
    return Traced(shared(loop), cond_consts, consts, types, first)
