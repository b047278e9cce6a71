"""From a user's functions to a loop and its operands.

What the functions close over becomes operands.
A carry leaf that every step passes on unchanged becomes a constant: it is then never saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _errors, _jax, _jaxpr
from loopkit._arguments import as_arrays, type_of
from loopkit._buffer import plain
from loopkit._cache import interned
from loopkit._carried import Buffers
from loopkit.engine.flat_rows import flat_rows, merged, restored
from loopkit.engine.loop import Loop, kept, parts, spread
from loopkit.engine.primitives import while_p
from loopkit.engine.reads_first import reads_first


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
    cond_consts: list
    consts: list
    fixed: tuple[bool, ...]
    """Which carry leaves never change. In the loop they are constants."""
    carry_types: list
    """Types of all carry leaves, as the steps leave them."""
    y_tree: Any
    free: tuple[bool, ...]
    """Which carry leaves of the loop are not buffers of a loop around it."""

    @property
    def closed_over(self) -> list:
        return [*self.cond_consts, *self.consts]

    def closing_over(self, values: list) -> Traced:
        """The same functions, over other values of the same types."""
        cond_consts, consts = parts(values, len(self.cond_consts))
        return replace(self, cond_consts=cond_consts, consts=consts)

    @property
    def has_custom_rules(self) -> bool:
        """Whether there are custom derivatives in it: their rules close over values unseen."""
        jaxprs = [self.loop.body] if self.loop.cond is None else [self.loop.cond, self.loop.body]
        names = (eqn.primitive.name for j in jaxprs for eqn in _jaxpr.all_equations(j))
        return any(name.startswith("custom_") for name in names)

    def converted(self, init: Sequence[Any]) -> list:
        """Initial values in the types that the loop carries."""
        return [_convert(v, t) for v, t in zip(init, self.carry_types, strict=True)]

    def of_length(self, length: int) -> Traced:
        """The same loop with another length."""
        make = lambda: interned(self.loop.replace(length=length))
        return replace(self, loop=self.loop.derived(("length", length), make))

    def run(self, init: Sequence[Any], xs: Sequence[Any]) -> tuple[list, list]:
        """Final carry leaves and ys leaves."""
        init = self.converted(init)
        fixed = kept(init, self.fixed)
        moving = kept(init, [not f for f in self.fixed])
        cond_fixed = fixed if self.loop.cond is not None else []
        types = self.loop.const_types
        consts = [
            _jax.vary_like(v, [t]) for v, t in zip([*self.consts, *fixed], types, strict=True)
        ]
        flat = flat_rows(self.loop, self.free)
        consts, moving = merged(consts, flat.consts), merged(moving, flat.carry)
        operands = [*self.cond_consts, *cond_fixed, *consts, *moving, *xs]
        outs = while_p.bind(*operands, loop=flat.loop)
        carry, ys = parts(outs, self.loop.carry_count)
        carry = restored(carry, self.loop.carry_types)
        return spread(carry, [not f for f in self.fixed], init), ys


def _convert(value: Any, aval: Any) -> Any:
    """An initial value in the type that the loop carries."""
    have = jax.typeof(value)
    if have.dtype != aval.dtype or (have.weak_type and not aval.weak_type):
        value = lax.convert_element_type(value, aval.dtype)
    return _jax.vary_like(value, [aval])


# ---------------------------------------------------------------- tracing


Step = Callable[[list, list], tuple[Any, Any]]
"""(carry leaves, x leaves) -> (carry, y), both trees."""
Predicate = Callable[[list], Any]
"""carry leaves -> bool scalar"""


def trace_loop(
    names: Names,
    step: Step,
    predicate: Predicate | None,
    init: Any,
    x_types: Sequence[Any],
    settings: dict[str, Any],
    buffers: Buffers | None = None,
    flag: int | None = None,
) -> Traced:
    """A loop over trees like `init`; `settings` are the fields of `Loop` that are not jaxprs.

    In a loop with buffers and a predicate, the leaf `flag` says whether a step is active.
    """
    leaves, tree = jax.tree.flatten(init)
    paths = [path[names.hidden :] for path, _ in jax.tree_util.tree_leaves_with_path(init)]
    types = [jax.typeof(v) for v in leaves]
    y_tree = None

    def body(*values: Any) -> list:
        nonlocal y_tree
        carry, x = parts(values, len(types))
        if buffers is None:
            new, y = step(carry, x)
        else:
            seen, owners = buffers.wrapped(carry, flag)
            new, y = step(seen, x)
            new, y = buffers.unwrapped(new, owners, carry), plain(y)
        new = as_arrays(names.function, names.body, new, names.hidden)
        y = as_arrays(names.function, names.body, y)
        new_leaves, new_tree = jax.tree.flatten(new)
        if new_tree != tree:
            differences = [
                (path[names.hidden :], before, after, why)
                for path, before, after, why in _jax.tree_differences(tree, new_tree)
            ]
            if differences:
                raise TypeError(
                    _errors.carry_structure(names.function, names.body, differences, names.init)
                )
        y_leaves, y_tree = jax.tree.flatten(y)
        return [*map(_stronger, new_leaves, types), *y_leaves]

    # A weakly typed start takes the type of what a step returns, as in lax; so does one that
    # differs between devices only after the first step.
    tries = 0
    while True:
        cond, cond_consts = None, []
        if predicate is not None:
            cond, cond_consts = _trace_predicate(names, predicate, types)
        jaxpr, consts = _jax.trace(body, [*types, *x_types], f"{names.function}_body")
        out = list(jaxpr.out_avals[: len(types)])
        decided_by = [] if cond is None else list(cond.out_avals)
        new = [_joined(a, b, decided_by) for a, b in zip(types, out, strict=True)]
        settled, types, tries = new == types, new, tries + 1
        if settled or tries == 4:
            break
    differences = [
        (path, a, b)
        for path, a, b in zip(paths, types, out, strict=True)
        if not _jax.same_type(a, b)
    ]
    if differences:
        raise TypeError(_errors.carry_types(names.function, names.body, differences, names.init))
    _check_effects(names, jaxpr, cond)
    jaxpr = jaxpr if buffers is None else reads_first(jaxpr)
    settings = {
        **settings,
        "buffers": () if buffers is None else buffers.flags,
        "flag": flag,
        "leaves": tuple(names.init + jax.tree_util.keystr(path) for path in paths),
    }
    free = () if buffers is None else buffers.free
    return as_loop(cond, cond_consts, jaxpr, consts, types, y_tree, settings, free)


def _check_effects(names: Names, *jaxprs: Any) -> None:
    effects = [e for j in jaxprs if j is not None for e in _jax.check_effects(j.effects)]
    if effects:
        raise NotImplementedError(
            _errors.wrong(
                names.function,
                names.body,
                "may have only side effects that a compiled loop can have",
                ", ".join(map(str, effects)),
                "Use jax.debug.print, jax.debug.callback or jax.experimental.io_callback.",
            )
        )


def scalar_bool(function: str, argument: str, value: Any) -> Any:
    """What a predicate returned, if it is one bool."""
    flat, tree = jax.tree.flatten(value)
    if not jax.tree_util.treedef_is_leaf(tree) or len(flat) != 1:
        got = f"a {type(value).__name__} ({tree})"
    else:
        try:
            array = _jax.as_array(value)
            got = _errors.short_type(jax.typeof(array))
            if array.shape == () and array.dtype == bool:
                return array
        except (TypeError, ValueError):
            got = f"{value!r} of type {type(value).__name__}"
    advice = "Reduce it with .any() or .all(), or compare with a number."
    raise TypeError(_errors.wrong(function, argument, "must return a scalar bool[]", got, advice))


def pair(names: Names, out: Any) -> tuple[Any, Any]:
    """What a step returned, if it is a carry and a y."""
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    size = f" of length {len(out)}" if isinstance(out, (tuple, list)) else ""
    got = f"{type(out).__name__}{size}"
    advice = "Return `carry, None` if there is nothing to stack."
    raise TypeError(
        _errors.wrong(names.function, names.body, "must return a pair (carry, y)", got, advice)
    )


def type_key(values: Sequence[Any]) -> tuple:
    """The types of values, weak ones told from strong."""
    types = tuple(map(type_of, values))
    return types, tuple(t.weak_type for t in types)


def _trace_predicate(names: Names, predicate: Predicate, types: list) -> tuple[Any, list]:
    def cond(*leaves: Any) -> list:
        return [scalar_bool(names.function, names.predicate, predicate(list(leaves)))]

    return _jax.trace(cond, types, f"{names.function}_cond")


def _stronger(value: Any, aval: Any) -> Any:
    """A weakly typed result in the (equal, strong) type that went in."""
    have = jax.typeof(value)
    if getattr(have, "weak_type", False) and not aval.weak_type and have.dtype == aval.dtype:
        return lax.convert_element_type(value, aval.dtype)
    return value


def _joined(before: Any, after: Any, decided_by: list) -> Any:
    """The type to start from, so that a step returns it."""
    if before.shape != after.shape:
        return before
    if before.weak_type and (not after.weak_type or before.dtype != after.dtype):
        dtype = _promoted_dtype(before, after)
        before = before.update(dtype=dtype, weak_type=dtype == after.dtype and after.weak_type)
    return _jax.type_like(before, [after, *decided_by])


def _promoted_dtype(a: Any, b: Any) -> Any:
    """The dtype that two types have in common; a weak one gives way."""
    scalars = {"b": True, "i": 0, "u": 0, "f": 0.0, "c": 0j}
    return jnp.result_type(*(scalars[t.dtype.kind] if t.weak_type else t.dtype for t in (a, b)))


def _of_moving(settings: dict, moving: Sequence[bool]) -> dict:
    """The settings that are about carry leaves."""
    flag = settings.get("flag")
    return {
        "buffers": tuple(kept(settings["buffers"], moving)) if settings.get("buffers") else (),
        "leaves": tuple(kept(settings["leaves"], moving)) if settings.get("leaves") else (),
        "flag": None if flag is None else sum(moving[:flag]),
    }


def as_loop(
    cond: Any,
    cond_consts: list,
    body: Any,
    consts: list,
    types: list,
    y_tree: Any,
    settings: dict,
    free: Sequence[bool] = (),
) -> Traced:
    """A loop of two jaxprs. Carry leaves that no step changes become constants of it.

    `free`: which leaves are not buffers of a loop around this one; empty: all of them.
    """
    n, c = len(types), len(consts)
    if cond is not None:
        floats = [_jax.is_differentiable(t) for t in body.in_avals[:c]]
        marked = floats + [False] * (len(body.in_avals) - c)
        body = _jaxpr.vary_inputs(body, marked, cond.out_avals)
    flag = settings.get("flag")
    source = _jaxpr.forwarded(body)
    fixed = tuple(source[i] == c + i and i != flag for i in range(n))
    moving = [not f for f in fixed]
    if any(fixed):
        whole_body, whole_cond = _jax.call_jaxpr(body), cond
        x_types = body.in_avals[c + n :]
        const_types = body.in_avals[:c]

        def fixed_body(*values: Any) -> list:
            before, still, carry, x = parts(values, c, sum(fixed), sum(moving))
            inputs = spread(still, fixed, spread(carry, moving, [None] * n))
            out, y = parts(whole_body(*before, *inputs, *x), n)
            return [*kept(out, moving), *y]

        parts_of = [*const_types, *kept(types, fixed), *kept(types, moving), *x_types]
        body, _ = _jax.trace(fixed_body, parts_of, "body")
        if cond is not None:
            k = len(cond_consts)

            def fixed_cond(*values: Any) -> list:
                before, still, carry = parts(values, k, sum(fixed))
                inputs = spread(still, fixed, spread(carry, moving, [None] * n))
                return _jax.call_jaxpr(whole_cond)(*before, *inputs)

            parts_of = [*cond.in_avals[:k], *kept(types, fixed), *kept(types, moving)]
            cond, _ = _jax.trace(fixed_cond, parts_of, "cond")
    loop = Loop(
        cond=cond,
        body=body,
        cond_const_count=0 if cond is None else len(cond.in_avals) - sum(moving),
        const_count=c + sum(fixed),
        carry_count=sum(moving),
        xs_count=len(body.in_avals) - c - n,
        **{**settings, **_of_moving(settings, moving)},
    )
    free = tuple(kept(free or [True] * n, moving))
    return Traced(interned(loop), cond_consts, consts, fixed, types, y_tree, free)
