"""Turn a `LoopSpec` into a `Traced` loop, and run it.

Values that the functions of a loop close over become operands of the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, static_leaves
from loopkit._buffers.buffer import plain
from loopkit._engine import steps as engine_steps
from loopkit._engine.facts.bounds import asked, bound_of, limits_in, of_all_steps
from loopkit._engine.facts.ranges import with_ranges
from loopkit._engine.leaves import CarryLeaf, Const, Input, Operands, Output
from loopkit._engine.loop import Loop, parts, run_rewritten
from loopkit._engine.passes import ready
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._programs import keep, recall, shared, with_fields
from loopkit._tracing.finite_steps import FiniteSteps, names_of
from loopkit._tracing.functions import (
    Functions,
    read,
    stop_gradient_in_predicate,
    without_references,
    write,
)
from loopkit._tracing.spec import Hidden, LoopSpec, Names

TRIES = 4
"""The maximum number of times to trace a step until it returns the types that it takes."""


def trace(spec: LoopSpec, hidden: Hidden) -> tuple[Traced, list, _jax.TreeDef]:
    """Return the loop, its initial carry, and the tree of the carry."""
    state = spec.init, hidden
    leaves, tree = jax.tree.flatten(state)
    functions = spec.functions if spec.carried.hashable else ()
    key, known = recall(functions, spec.key(leaves, tree))
    if known is None:
        known = trace_loop(FlatSteps(spec, state))
        keep(key, functions, known)
    return known, leaves, tree


class FlatSteps:
    """The body and predicate of a loop, as functions of the leaves of its state."""

    def __init__(self, spec: LoopSpec, state: tuple[Any, Hidden], traced: bool = True):
        """`traced` says whether stopped lanes take steps too, so that writes need a mask."""
        leaves, self.tree = jax.tree.flatten(state)
        self.spec, self.state, self.types = spec, state, list(map(jax.typeof, leaves))
        own = len(jax.tree.leaves(spec.init))
        decided, self.traced = state[1].go is not None, traced
        self.flag = own if decided and traced else None
        self.counter = own + decided
        number = self.counter if spec.checking else None
        self.buffers = spec.carried.followed_by(len(leaves) - own, number)
        self.y_tree: Any = None

    def body(self, *values: jax.Array) -> list:
        """Take a step: return the next carry, and y, from the carry and slices of the inputs."""
        names, buffers = self.spec.names, self.buffers
        carry, x = parts(values, len(self.types))
        if not buffers.any:
            new, y = self.spec.step(self.tree.unflatten(carry), x)
        else:
            seen, owners = buffers.wrapped(carry, self.flag)
            new, y = self.spec.step(self.tree.unflatten(seen), x)
            new, y = buffers.unwrapped(new, owners, carry), plain(y)
        new = static_leaves.wrapped(names.function, names.body, new, names.hidden)
        y = static_leaves.wrapped(names.function, names.body, y)
        new = static_leaves.kept(*names[:3], self.state, new, names.hidden)
        if jax.tree.structure(new) != self.tree:
            _check_structure(names, self.state, new)
        y_leaves, self.y_tree = jax.tree.flatten(y)
        return [*jax.tree.leaves(new), *y_leaves]

    def cond(self, *leaves: jax.Array) -> list:
        """Return whether there is another step."""
        carry, hidden = self.tree.unflatten(leaves)
        if hidden.left is None:
            return [self.spec.goes_on(carry) if hidden.go is None else hidden.go]
        some = hidden.left > 0
        return [some if hidden.go is None else some & hidden.go]

    def finite(self) -> FiniteSteps:
        """Return how to watch steps that must stay finite."""
        spec, leaves = self.spec, tree_leaves_with_path(self.state)
        # In Python, buffers are like other leaves.
        buffers = self.buffers.flags if self.traced else (False,) * len(leaves)
        held = enumerate(zip(leaves, buffers, strict=True))
        missing = tuple((i, v.shape, v.dtype) for i, ((_, v), has) in held if has)
        loop = spec.watched(self.tree, missing)
        return FiniteSteps(loop, *self.names(), self.counter, buffers)

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the leaves of the carry, and of the inputs, in errors."""
        spec, leaves = self.spec, tree_leaves_with_path(self.state)
        tree, axes = spec.inputs.tree, spec.inputs.axes
        xs = tree.unflatten(spec.inputs.leaves)
        of_x = zip(names_of(spec.names.inputs, xs), axes, strict=True)
        x_names = tuple(name for name, axis in of_x if axis is not None)
        return tuple(spec.leaf_name(path) for path, _ in leaves), x_names


def trace_loop(steps: FlatSteps) -> Traced:
    """Trace the functions of a loop, as the caller wrote them."""
    spec, names, x_types = steps.spec, steps.spec.names, steps.spec.inputs.slice_types
    types, tries = steps.types, 0
    step, goes_on = (None, None) if spec.made else (spec.body, spec.predicate)
    carried, rows = ([name.strip("`") for name in some] for some in steps.names())
    # As in lax, weakly typed initial values are promoted if a step returns another dtype. A value
    # that varies between devices only after the first step is made to vary before it.
    while True:
        cond, cond_consts = None, []
        if spec.predicate is not None or steps.state[1].left is not None:
            cond, cond_consts = _jax.trace(
                steps.cond, types, f"{names.function}_cond", goes_on, carried
            )
        jaxpr, consts = _jax.trace(
            steps.body, [*types, *x_types], f"{names.function}_body", step, [*carried, *rows]
        )
        out = list(jaxpr.out_avals[: len(types)])
        decided_by = [] if cond is None else list(cond.out_avals)
        before, types = types, [_joined(a, b, decided_by) for a, b in zip(types, out, strict=True)]
        tries += 1
        if types == before or tries == TRIES:
            break
    paths = [path[names.hidden :] for path, _ in tree_leaves_with_path(steps.state)]
    _check_types(names, zip(paths, types, out, strict=True))
    of = Functions(cond, cond_consts, jaxpr, consts)
    if _jax.has_references(jaxpr) or (cond is not None and _jax.has_references(cond)):
        of = without_references(of, len(types))
    _check_effects(names, of.body, of.cond)
    if steps.flag is not None:
        of = of._replace(body=stop_gradient_in_predicate(of.body, steps.flag))
    if spec.finite is not None:
        of = _watched(steps, of)
    carry = [*_leaves(steps, paths), *[CarryLeaf("a reference")] * len(of.references)]
    types += map(_jax.type_in, of.references)
    settings = {"length": spec.length, "checkpoints": spec.budget, "unroll": spec.unroll}
    settings |= {"name": names.function, "lane_policy": spec.lanes, "progress": spec.progress}
    settings |= {"reverse": spec.reverse, "xs": tuple(map(Input, spec.inputs.places))}
    return as_loop(of, carry, types, settings, steps.y_tree)


def _watched(steps: FlatSteps, of: Functions) -> Functions:
    names = steps.spec.names
    if of.references:
        expected = f"cannot be given if `{names.body}` reads or writes references made outside"
        got = f"a reference to {errors.short_type(_jax.type_in(of.references[0]))}"
        advice = f"Put the values of the references into `{names.init}`."
        raise NotImplementedError(errors.wrong(names.function, "debug", expected, got, advice))
    return of._replace(body=steps.finite().of_jaxpr(of.body, len(of.consts), steps.y_tree))


def _leaves(steps: FlatSteps, paths: list) -> list:
    """Return a `CarryLeaf` for each leaf of the carry."""
    buffers = steps.buffers
    flag = steps.flag if buffers.any else None  # writes depend on it
    leaves = enumerate(zip(paths, buffers.flags, buffers.outer, strict=True))
    return [
        CarryLeaf(steps.spec.names.init + keystr(path), has, i == flag, owner is not None)
        for i, (path, has, owner) in leaves
    ]


def _check_types(names: Names, carry: Iterable[tuple[Any, Any, Any]]) -> None:
    function, body, init, *_ = names
    differences = [
        (path, errors.short_type(before), errors.short_type(after))
        for path, before, after in carry
        if not _jax.same_type(before, after)
    ]
    if differences:
        expected = f"must return a carry of the types of `{init}`"
        advice = f"Cast in `{body}` (.astype), or pass `{init}` in the types that it returns."
        raise errors.wrong_carry(function, body, expected, init, differences, advice)


def _check_structure(names: Names, before: PyTree[Any], after: PyTree[Any]) -> None:
    function, body, init, *_ = names
    trees = map(static_leaves.shape_of, (before, after))
    differences = [
        (tuple(path[names.hidden :]), a, f"{b}, so {why}")
        for path, a, b, why in _jax.equality_errors_pytreedef(*trees)
    ]
    if differences:
        expected = f"must return a carry of the structure of `{init}`"
        advice = f"Return a tree like `{init}`."
        raise errors.wrong_carry(function, body, expected, init, differences, advice)


def _check_effects(names: Names, *jaxprs: _jax.Jaxpr | None) -> None:
    effects = [e for j in jaxprs if j is not None for e in _jax.check_effects(j.effects)]
    if effects:
        expected = "may have only side effects that compiled loops can have"
        advice = "Use jax.debug.print, jax.debug.callback or jax.experimental.io_callback."
        got = ", ".join(map(str, effects))
        raise NotImplementedError(errors.wrong(names.function, names.body, expected, got, advice))


def _joined(before: _jax.ShapedArray, after: _jax.ShapedArray, decided_by: list) -> Any:
    """Return the type that an initial value needs so that a step returns the same type."""
    if before.shape != after.shape:
        return before
    if before.weak_type and before.dtype != after.dtype:
        # As in lax, the result is strongly typed in any case.
        dtype = jnp.result_type(np.zeros((), before.dtype).item(), after.dtype)
        before = before.update(dtype=dtype, weak_type=False)
    return _jax.type_like(before, [after, *decided_by])


@dataclass(frozen=True)
class Traced:
    """The body and predicate of a loop, and what they close over."""

    loop: Loop
    """The loop as the caller wrote it, before any pass."""
    cond_consts: list
    consts: list
    init_types: list
    """The types of the initial carry. They are strong if a step makes them strong."""
    y_tree: Any
    references: Sequence[Any]
    """The references made outside the loop that the steps use. They follow the carry's leaves."""

    @property
    def closed_over(self) -> list:
        return [*self.cond_consts, *self.consts, *self.references]

    def closing_over(self, values: list) -> Traced:
        """Return the same functions, closing over other values of the same types."""
        cond_consts, consts, held = parts(values, len(self.cond_consts), len(self.consts))
        return replace(self, cond_consts=cond_consts, consts=consts, references=held)

    def with_fields(self, **changes: Any) -> Traced:
        """Return the same loop with other fields."""
        return replace(self, loop=with_fields(self.loop, **changes))

    def bounded(self, init: Sequence[Any]) -> Traced:
        """Return the loop with the bound that its predicate implies for this `init`."""
        loop, most = (
            self.loop,
            engine_steps.LAST_STEP if self.loop.length is None else self.loop.length,
        )
        if loop.cond is None:
            return self
        limits = limits_in(loop)
        if not limits.found:
            return self
        init = [*init, *read(self.references)]
        bound = bound_of(limits, asked(loop, Operands(self.cond_consts, self.consts, init, [])))
        if bound is None or bound.steps > most or not bound.is_planned_for(loop.checkpoints):
            return self
        values = map(_jax.innermost, (*self.cond_consts, *self.consts, *init))
        if not any(map(_jax.is_tracer, values)):
            # Outside jit, each bound is compiled separately: round up, so that there are few.
            few = 1 << max(0, bound.steps - 1).bit_length()
            return self.with_fields(length=min(most, few if loop.progress is None else bound.steps))
        if not bound.exact:
            return self.with_fields(length=bound.steps)
        return replace(self, loop=of_all_steps(loop, bound.steps), cond_consts=[])

    def stacked(self, places: Sequence[int]) -> Traced:
        """Return the loop with ys stacked along these axes."""
        return self.with_fields(ys=tuple(map(Output, places))) if any(places) else self

    def run(self, init: Sequence[Any], xs: Sequence[Any], split: bool | None = None) -> tuple:
        """Run the loop; return the leaves of the final carry, and of ys.

        If `split` is not None, it runs as lax's scan, with that value for `_split_transpose`.
        """
        count = len(init)
        init = [*init, *read(self.references)] if self.references else list(init)
        loop = with_ranges(self.loop, Operands(self.cond_consts, self.consts, init, list(xs)))
        loop, passes = ready(loop)
        # A loop that was flattened is no longer a scan.
        as_lax = split is not None and loop.cond is None
        bind = partial(_lax_scan, split=split) if as_lax else while_p.bind
        meshes = loop.derived("meshes", lambda: equations.meshes(loop.body))
        bound = lambda *operands: bind(*_jax.known_on(meshes, list(operands)), loop=loop)
        first = [_jax.as_type(v, t) for v, t in zip(init, self.init_types, strict=True)]
        operands = [*self.cond_consts, *self.consts, *first, *xs]
        final, held, ys = parts(run_rewritten(bound, passes, operands), count, len(self.references))
        if held:
            write(self.references, held)
        return final, ys


@partial(jax.jit, static_argnames=("loop", "split"), inline=True)
def _lax_scan(*operands: jax.Array, loop: Loop, split: bool) -> list:
    """Run the traced step with lax's scan, which stores the residuals of every step."""
    given, _ = loop.split(operands)
    if loop.length == 0:  # lax refuses this outside a trace
        return engine_steps.evaluate(loop, given)
    return engine_steps.scan(loop, given, split)


def as_loop(
    of: Functions, carry: list, types: list, settings: dict, y_tree: _jax.TreeDef | None = None
) -> Traced:
    """Make a loop of its functions. `settings` has its other fields."""
    n, c = len(types), len(of.consts)
    settings = {"xs": (Input(),) * (len(of.body.in_avals) - c - n), **settings}
    ys, constants = (Output(),) * (len(of.body.out_avals) - n), (Const(),) * c
    loop = Loop(of.cond, of.body, len(of.cond_consts), constants, tuple(carry), ys=ys, **settings)
    pairs = zip(types, loop.carry_types, strict=True)
    first = [a.update(weak_type=a.weak_type and b.weak_type) for a, b in pairs]
    return Traced(shared(loop), of.cond_consts, of.consts, first, y_tree, of.references)
