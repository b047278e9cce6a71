"""From a user's functions to a loop and its operands: what they close over becomes operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, static_leaves
from loopkit._arguments.validate import type_of
from loopkit._buffers.buffer import plain
from loopkit._engine.facts.bounds import asked, bound_of, limits_in, of_all_steps, of_length
from loopkit._engine.facts.ranges import with_ranges
from loopkit._engine.leaves import Operands
from loopkit._engine.loop import CarryLeaf, Const, Input, Loop, Output, parts, run_rewritten
from loopkit._engine.passes import ready
from loopkit._engine.primitives import while_p
from loopkit._engine.steps import LAST_STEP
from loopkit._jaxprs import equations
from loopkit._programs.cache import shared
from loopkit._progress.progress import ProgressSettings
from loopkit._tracing import references
from loopkit._tracing.carry_buffers import Buffers
from loopkit._tracing.finite_steps import FiniteSteps
from loopkit._tracing.predicate_gradient import stop_gradient_in_predicate


class Names(NamedTuple):
    """How the caller's arguments are called, for errors."""

    function: str
    """"while_loop", "scan" or "fori_loop"."""
    body: str
    init: str
    predicate: str
    hidden: int = 1
    """Levels of the loop's carry above the caller's."""


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
    """The same; a step may leave strong what it takes as weak: then it is so from the beginning."""
    y_tree: Any = None
    references: Sequence[Any] = ()
    """What they read and write, made outside: leaves behind those of the carry."""

    @property
    def closed_over(self) -> list:
        return [*self.cond_consts, *self.consts, *self.references]

    def closing_over(self, values: list) -> Traced:
        """The same functions, over other values of the same types."""
        counts = len(self.cond_consts), len(self.consts)
        cond_consts, consts, held = parts(values, *counts)
        return replace(self, cond_consts=cond_consts, consts=consts, references=held)

    def of_length(self, length: int) -> Traced:
        """The same loop with another length."""
        return replace(self, loop=of_length(self.loop, length))

    def showing(self, progress: ProgressSettings) -> Traced:
        """The same loop, which shows in another way how far it is."""
        make = lambda: shared(self.loop.replace(progress=progress))
        return replace(self, loop=self.loop.derived(progress, make))

    def bounded(self, init: Sequence[Any]) -> Traced:
        """The same loop, with the bound that its predicate has where it starts from here."""
        loop, most = self.loop, LAST_STEP if self.loop.length is None else self.loop.length
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

    def run(self, init: Sequence[Any], xs: Sequence[Any], scan: Callable | None = None) -> tuple:
        """Final carry leaves and ys leaves; of a `scan` that traces the steps again, if given."""
        types, count = self.init_types if scan is None else self.carry_types, len(init)
        init = [*init, *references.read(self.references)]
        loop = with_ranges(self.loop, Operands(self.cond_consts, self.consts, init, list(xs)))
        loop, passes = ready(loop)
        # One that was flattened is no scan any more.
        bind = while_p.bind if scan is None or loop.cond is not None else scan
        meshes = loop.derived("meshes", lambda: equations.meshes(loop.body))
        bound = lambda *operands: bind(*_jax.known_on(meshes, list(operands)), loop=loop)
        first = [_convert(v, t) for v, t in zip(init, types, strict=True)]
        operands = [*self.cond_consts, *self.consts, *first, *xs]
        final, held, ys = parts(run_rewritten(bound, passes, operands), count, len(self.references))
        references.write(self.references, held)
        return final, ys


def _convert(value: jax.Array, aval: _jax.ShapedArray) -> Any:
    """An initial value in the type that the loop carries."""
    have = jax.typeof(value)
    if have.dtype != aval.dtype or (have.weak_type and not aval.weak_type):
        value = lax.convert_element_type(value, aval.dtype)
    return _jax.vary_like(value, [aval])


def trace_loop(
    names: Names,
    step: Callable[[list, list], tuple[Any, Any]],
    predicate: Callable[[list], Any] | None,
    init: PyTree[Any],
    x_types: Sequence[Any],
    settings: dict[str, Any],
    buffers: Buffers | None = None,
    flag: int | None = None,
    finite: FiniteSteps | None = None,
) -> Traced:
    """A loop over trees like `init`; `settings` are the fields of `Loop` that are not jaxprs.

    `step`: carry leaves and x leaves to trees, carry and y. `predicate`: carry leaves to a bool.
    `flag`: the leaf that says whether there is another step, if one does. `finite`: how steps are
    watched that have to stay finite.
    """
    leaves, tree = jax.tree.flatten(init)
    paths = [path[names.hidden :] for path, _ in jax.tree_util.tree_leaves_with_path(init)]
    types = [jax.typeof(v) for v in leaves]
    y_tree, names_of = None, (names.function, names.predicate)

    def body(*values: jax.Array) -> list:
        nonlocal y_tree
        carry, x = parts(values, len(types))
        if buffers is None:
            new, y = step(carry, x)
        else:
            seen, owners = buffers.wrapped(carry, flag)
            new, y = step(seen, x)
            new, y = buffers.unwrapped(new, owners, carry), plain(y)
        new = static_leaves.wrapped(names.function, names.body, new, names.hidden)
        y = static_leaves.wrapped(names.function, names.body, y)
        new = static_leaves.kept(*names[:3], init, new, names.hidden)
        if jax.tree.structure(new) != tree:
            _check_structure(names, init, new)
        y_leaves, y_tree = jax.tree.flatten(y)
        return [*jax.tree.leaves(new), *y_leaves]

    # A weakly typed start is promoted, as in lax, where a step returns another dtype. One that
    # differs between devices only after the first step is made to do so before.
    tries = 0
    while True:
        cond, cond_consts = None, []
        if predicate is not None:
            asks = lambda *leaves: [scalar_bool(*names_of, predicate(list(leaves)))]
            cond, cond_consts = _jax.trace(asks, types, f"{names.function}_cond")
        jaxpr, consts = _jax.trace(body, [*types, *x_types], f"{names.function}_body")
        out = list(jaxpr.out_avals[: len(types)])
        decided_by = [] if cond is None else list(cond.out_avals)
        new = [_joined(a, b, decided_by) for a, b in zip(types, out, strict=True)]
        settled, types, tries = new == types, new, tries + 1
        if settled or tries == 4:
            break
    _check_types(names, zip(paths, types, out, strict=True))
    of = references.without_references(cond, cond_consts, jaxpr, consts, len(types))
    _check_effects(names, of.body, of.cond)
    of = of if flag is None else of._replace(body=stop_gradient_in_predicate(of.body, flag))
    of = of if finite is None else _watched(names, of, finite, y_tree)
    masks = buffers is not None or finite is not None  # what is written, or must not be infinite
    carry = _leaves(names, paths, buffers, flag if masks else None)
    carry += [CarryLeaf("a reference")] * len(of.references)
    types += map(_jax.type_in, of.references)
    loop = as_loop(of.cond, of.cond_consts, of.body, of.consts, carry, types, settings)
    return replace(loop, y_tree=y_tree, references=of.references)


def _watched(
    names: Names, of: references.Functions, finite: FiniteSteps, y_tree: _jax.TreeDef
) -> references.Functions:
    if of.references:
        expected = f"cannot be given where `{names.body}` reads or writes references made outside"
        got = errors.short_type(_jax.type_in(of.references[0]))
        advice = f"Put what it holds into `{names.init}`, and return what is written."
        raise NotImplementedError(errors.wrong(names.function, "debug", expected, got, advice))
    return of._replace(body=finite.of_jaxpr(of.body, len(of.consts), y_tree))


def _leaves(names: Names, paths: list, buffers: Buffers | None, flag: int | None) -> list:
    """The records of a carry's leaves."""
    of_leaf = [(False, None)] * len(paths)
    if buffers is not None:
        of_leaf = list(zip(buffers.flags, buffers.outer, strict=True))
    return [
        CarryLeaf(names.init + keystr(path), has, i == flag, owner is not None)
        for i, (path, (has, owner)) in enumerate(zip(paths, of_leaf, strict=True))
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


def scalar_bool(function: str, argument: str, value: PyTree[Any]) -> Any:
    """What a predicate returned, if it is one bool."""
    if not jax.tree_util.all_leaves([value]):
        got = f"a {type(value).__name__} ({jax.tree.structure(value)})"
    else:
        try:
            array = _jax.as_array(value)
            if array.shape == () and array.dtype == bool:
                return array
            got = errors.short_type(jax.typeof(array))
        except (TypeError, ValueError):
            got = errors.shown(value)
    advice = "Reduce it with .any() or .all(), or compare with a number."
    raise errors.wrong_type(function, argument, "must return a scalar bool[]", got, advice)


def pair(names: Names, out: PyTree[Any]) -> tuple[Any, Any]:
    """What a step returned, if it is a carry and a y."""
    is_sequence = isinstance(out, (tuple, list))
    if is_sequence and len(out) == 2:
        return out[0], out[1]
    got = type(out).__name__ + (f" of length {len(out)}" if is_sequence else "")
    expected = "must return a pair (carry, y)"
    advice = "Return `carry, None` if there is nothing to stack."
    raise errors.wrong_type(names.function, names.body, expected, got, advice)


def type_key(values: Sequence[Any]) -> tuple:
    """The types of values, weak ones told from strong."""
    types = tuple(map(type_of, values))
    return types, tuple([t.weak_type for t in types])


def _joined(before: _jax.ShapedArray, after: _jax.ShapedArray, decided_by: list) -> Any:
    """The type to start from, so that a step returns it."""
    if before.shape != after.shape:
        return before
    if before.weak_type and before.dtype != after.dtype:
        # The result counts as strong, whatever it is: so it does in lax.
        dtype = jnp.result_type(np.zeros((), before.dtype).item(), after.dtype)
        before = before.update(dtype=dtype, weak_type=False)
    return _jax.type_like(before, [after, *decided_by])


def as_loop(
    cond: _jax.Jaxpr | None,
    cond_consts: list,
    body: _jax.Jaxpr,
    consts: list,
    carry: list,
    types: list,
    settings: dict,
) -> Traced:
    """A loop of two jaxprs. `settings`: other fields of it."""
    n, c = len(types), len(consts)
    settings = {"xs": (Input(),) * (len(body.in_avals) - c - n), **settings}
    ys, constants = (Output(),) * (len(body.out_avals) - n), (Const(),) * c
    loop = Loop(cond, body, len(cond_consts), constants, tuple(carry), ys=ys, **settings)
    pairs = zip(types, loop.carry_types, strict=True)
    first = [a.update(weak_type=a.weak_type and b.weak_type) for a, b in pairs]
    return Traced(shared(loop), cond_consts, consts, types, first)
