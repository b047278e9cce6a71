"""`trace`: from a `LoopSpec` to a loop, whose operands are also what its functions close over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, static_leaves
from loopkit._buffers.buffer import plain
from loopkit._engine.leaves import CarryLeaf, Input
from loopkit._engine.loop import parts
from loopkit._programs.cache import keep, recall
from loopkit._tracing.finite_steps import FiniteSteps, names_of
from loopkit._tracing.predicate_gradient import stop_gradient_in_predicate
from loopkit._tracing.references import Functions, without_references
from loopkit._tracing.spec import Hidden, LoopSpec, Names
from loopkit._tracing.traced import Traced, as_loop

TRIES = 4
"""How often a step is traced until it returns the types that it takes."""


def trace(spec: LoopSpec, hidden: Hidden) -> tuple[Traced, list, _jax.TreeDef]:
    """Return the loop, its initial carry, and the tree of that."""
    state = spec.init, hidden
    leaves, tree = jax.tree.flatten(state)
    functions = spec.functions if not spec.carried.any or spec.carried.hashable else ()
    key, known = recall(functions, spec.key(leaves, tree))
    if known is None:
        known = trace_loop(FlatSteps(spec, state))
        keep(key, functions, known)
    return known, leaves, tree


class FlatSteps:
    """The two functions of a loop, of the leaves of its state."""

    def __init__(self, spec: LoopSpec, state: tuple[Any, Hidden], traced: bool = True):
        """`traced`: whether stopped lanes take steps too, so that writes are to be masked."""
        leaves, self.tree = jax.tree.flatten(state)
        self.spec, self.state, self.types = spec, state, list(map(jax.typeof, leaves))
        own = len(jax.tree.leaves(spec.init))
        decided = state[1].go is not None
        self.flag = own if decided and traced else None
        self.counter = own + decided
        self.buffers = None
        if spec.carried.any:
            number = self.counter if spec.checking else None
            self.buffers = spec.carried.followed_by(len(leaves) - own, number)
        self.y_tree: Any = None

    def body(self, *values: jax.Array) -> list:
        """Take a step: the next carry, and y, from the carry and slices of the inputs."""
        names, buffers = self.spec.names, self.buffers
        carry, x = parts(values, len(self.types))
        if buffers is None:
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
        """Say whether there is another step."""
        carry, hidden = self.tree.unflatten(leaves)
        if hidden.left is None:
            return [self.spec.goes_on(carry) if hidden.go is None else hidden.go]
        some = hidden.left > 0
        return [some if hidden.go is None else some & hidden.go]

    @property
    def ends(self) -> bool:
        """Whether there is a predicate."""
        return self.spec.predicate is not None or self.state[1].left is not None

    def finite(self) -> FiniteSteps:
        """Return how steps that have to stay finite are watched."""
        spec, leaves = self.spec, tree_leaves_with_path(self.state)
        buffers = *spec.carried.flags, *[False] * (len(leaves) - len(spec.carried.flags))
        held = enumerate(zip(leaves, buffers, strict=True))
        missing = tuple((i, v.shape, v.dtype) for i, ((_, v), has) in held if has)
        names = tuple(spec.leaf_name(path) for path, _ in leaves)
        tree, axes = spec.inputs.tree, spec.inputs.axes
        of_x = zip(names_of(spec.names.inputs, tree.unflatten(range(len(axes)))), axes, strict=True)
        x_names = tuple(name for name, axis in of_x if axis is not None)
        left = None if self.state[1].left is None else self.counter + 1
        loop = spec.watched(self.tree, missing)
        return FiniteSteps(loop, names, x_names, self.flag, self.counter, buffers, left)


def trace_loop(steps: FlatSteps) -> Traced:
    """Trace the functions of a loop, as it is written."""
    spec, names, x_types = steps.spec, steps.spec.names, steps.spec.inputs.slice_types
    types, tries = steps.types, 0
    # A weakly typed start is promoted, as in lax, where a step returns another dtype. One that
    # differs between devices only after the first step is made to do so before.
    while True:
        cond, cond_consts = None, []
        if steps.ends:
            cond, cond_consts = _jax.trace(steps.cond, types, f"{names.function}_cond")
        jaxpr, consts = _jax.trace(steps.body, [*types, *x_types], f"{names.function}_body")
        out = list(jaxpr.out_avals[: len(types)])
        decided_by = [] if cond is None else list(cond.out_avals)
        before, types = types, [_joined(a, b, decided_by) for a, b in zip(types, out, strict=True)]
        tries += 1
        if types == before or tries == TRIES:
            break
    paths = [path[names.hidden :] for path, _ in tree_leaves_with_path(steps.state)]
    _check_types(names, zip(paths, types, out, strict=True))
    of = Functions(cond, cond_consts, jaxpr, consts)
    if any(j is not None and _jax.has_references(j) for j in (cond, jaxpr)):
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
    loop = as_loop(of.cond, of.cond_consts, of.body, of.consts, carry, types, settings)
    return replace(loop, y_tree=steps.y_tree, references=of.references)


def _watched(steps: FlatSteps, of: Functions) -> Functions:
    names = steps.spec.names
    if of.references:
        expected = f"cannot be given where `{names.body}` reads or writes references made outside"
        got = errors.short_type(_jax.type_in(of.references[0]))
        advice = f"Put what it holds into `{names.init}`, and return what is written."
        raise NotImplementedError(errors.wrong(names.function, "debug", expected, got, advice))
    return of._replace(body=steps.finite().of_jaxpr(of.body, len(of.consts), steps.y_tree))


def _leaves(steps: FlatSteps, paths: list) -> list:
    """Return the records of a carry's leaves."""
    flags, outer = [False] * len(paths), [None] * len(paths)
    if steps.buffers is not None:
        flags, outer = steps.buffers.flags, steps.buffers.outer
    # What is written, or must not be infinite, hangs on it.
    flag = steps.flag if steps.buffers is not None or steps.spec.finite is not None else None
    return [
        CarryLeaf(steps.spec.names.init + keystr(path), has, i == flag, owner is not None)
        for i, (path, has, owner) in enumerate(zip(paths, flags, outer, strict=True))
    ]


def _check_types(names: Names, carry: Iterable[tuple[Any, Any, Any]]) -> None:
    function, body, init, *_ = names
    differences = [
        f"`{init}{keystr(path)}` is {errors.short_type(before)}, "
        f"but `{body}` returns {errors.short_type(after)}"
        for path, before, after in carry
        if not _jax.same_type(before, after)
    ]
    if differences:
        advice = f"or start from an `{init}` of the type that a step returns."
        advice = f"Cast in `{body}` (for instance with .astype), {advice}"
        raise errors.wrong_carry(function, body, f"types of `{init}`, got", differences, advice)


def _check_structure(names: Names, before: PyTree[Any], after: PyTree[Any]) -> None:
    function, body, init, *_ = names
    trees = map(static_leaves.shape_of, (before, after))
    differences = [
        f"at `{init}{keystr(tuple(path[names.hidden :]))}`: expected {a}, got {b}, so {why}"
        for path, a, b, why in _jax.equality_errors_pytreedef(*trees)
    ]
    if differences:
        expected = f"structure of `{init}`, but they differ:"
        advice = f"Return from `{body}` the same tree as `{init}`."
        raise errors.wrong_carry(function, body, expected, differences, advice)


def _check_effects(names: Names, *jaxprs: _jax.Jaxpr | None) -> None:
    effects = [e for j in jaxprs if j is not None for e in _jax.check_effects(j.effects)]
    if effects:
        expected = "may have only side effects that a compiled loop can have"
        advice = "Use jax.debug.print, jax.debug.callback or jax.experimental.io_callback."
        got = ", ".join(map(str, effects))
        raise NotImplementedError(errors.wrong(names.function, names.body, expected, got, advice))


def _joined(before: _jax.ShapedArray, after: _jax.ShapedArray, decided_by: list) -> Any:
    """The type to start from, so that a step returns it."""
    if before.shape != after.shape:
        return before
    if before.weak_type and before.dtype != after.dtype:
        # The result counts as strong, whatever it is: so it does in lax.
        dtype = jnp.result_type(np.zeros((), before.dtype).item(), after.dtype)
        before = before.update(dtype=dtype, weak_type=False)
    return _jax.type_like(before, [after, *decided_by])
