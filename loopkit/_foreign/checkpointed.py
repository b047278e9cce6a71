"""`checkpointed`: trace someone else's function, with its loops replaced.

Binding equations one by one in Python takes microseconds each. So outside jit, loopkit compiles the
function as one program, once for all its calls, if that gives the same results.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple, Unpack, overload

import jax
import numpy as np
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.error_on_use import is_refused
from loopkit._arguments.validate import type_of
from loopkit._engine.derivative.ways import MARGIN
from loopkit._engine.derivative.whole_program import with_parts
from loopkit._engine.leaves import spread
from loopkit._engine.loop import kept
from loopkit._foreign.lax_loop import CheckpointedKw, LoopSite, Settings
from loopkit._foreign.replace import replacing, settings_of, with_rules
from loopkit._jaxprs import equations
from loopkit._jaxprs.products import ready_to_transpose
from loopkit._plans.budget import Bytes, Part
from loopkit._programs import Unknown, interned, is_of_library, program_key, remember
from loopkit._types import Checkpoints, Debug, Decorator, Lanes, Memory, P, Progress, R


@overload
def checkpointed(fn: Callable[P, R], **kw: Unpack[CheckpointedKw]) -> Callable[P, R]: ...
@overload
def checkpointed(fn: None = None, **kw: Unpack[CheckpointedKw]) -> Decorator: ...
def checkpointed(
    fn: Callable[P, R] | None = None,
    *,
    max_steps: int | None = None,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    measure: bool = False,
    only: Callable[[LoopSite], Any] | None = None,
    strict: bool | None = None,
    lanes: Lanes = None,
    progress: Progress = None,
    debug: Debug = None,
) -> Callable[P, R] | Decorator:
    """Replace every `jax.lax` loop inside `fn` by loopkit's.

    `jax.lax.while_loop`, `scan` and `fori_loop` are replaced wherever `fn` calls them, directly or
    through libraries, `jit`, `cond`, `jax.checkpoint`, custom derivatives, other loops, or
    `shard_map`. The result computes the same values. You can differentiate it in every mode, even
    if `fn` has no gradient, and the backward pass of long loops fits in memory.

    **Arguments:**

    - `fn`: any function that JAX can trace. Arrays become abstract, as under `jax.jit`, and so do
        arguments that are floats or complex numbers. Other leaves are passed to `fn`, and returned,
        as they are: bools, ints, strings, functions, and the numbers in a model. `fn` has to be
        pure: calls with the very same functions and types share a trace. If an argument is an
        object that may have changed, such as the `self` of a method, `fn` is traced at every call.
        Values that `fn` closes over are read when it is traced, as under `jax.jit`. If tracing
        finds no loop, and the budget asks for no code to run again, later calls run `fn` itself.
    - `max_steps`: the most steps of each while loop, a static int; None for no bound. A loop that
        needs more steps stops there.
    - `checkpoints`: what the backward pass of each loop keeps, as in `loopkit.while_loop`. With
        "all", while loops need a bound: `max_steps`, or their own.
    - `memory`: a budget in bytes instead, for the gradient of `fn` in all its arguments, with loops
        or without. It limits the temporary memory of the whole gradient, as predicted: what the
        loops save and need while they are reversed, and the values between them. A tenth of it is
        left to the compiler, if a plan is that small. The loops share it with the code between
        them, and loopkit chooses what runs again so that the gradient takes the least predicted
        time. Loops with a budget of their own keep it, and loops that `fn` itself differentiates
        keep their default. If the gradient needs more, taking it raises an error that names the
        least budget that will do, and what takes most of it. If it is predicted to need up to eight
        times the budget, loopkit compiles it first, and raises only if the compiler agrees.
    - `measure`: True limits what the compiler reports for the gradient, and not what loopkit
        predicts. loopkit then compiles the gradient each time that it traces `fn`, in the arguments
        for which one is asked, or in all of them inside a `jit` or a loop that is differentiated:
        once or twice as a rule, and up to nine times while it looks for the fastest plan that fits.
        It raises the error only if none fits. `memory` must be one number of bytes.
    - `only`: `LoopSite -> bool`, called once for each loop that is traced. It returns whether to
        replace the loop. A `LoopSite` has `kind`, `name_stack`, `source`, `length`, `carry_bytes`,
        `depth` (the number of loops around it) and `outer` (the `LoopSite` of the innermost of
        these, or None). If a function with a loop is called in two other loops, `only` is called
        for each. If there are loops, it must choose at least one.
    - `strict`: True raises an error for a loop that loopkit cannot replace, unless `only` leaves
        it, and if `fn` has no loop. By default such a loop stays as it is, and `loopkit.explain`
        says why. False also allows an `only` that chooses no loop.
    - `lanes`: what lanes of `jax.vmap` do after they have stopped, as in `loopkit.while_loop`. With
        "flatten", each loop that is in no other loop is flattened, with the loops inside it.
    - `progress`: shows how far each loop is, as in `loopkit.while_loop`. The bars of inner loops
        come and go.
    - `debug`: as in `loopkit.while_loop`, for each loop; errors name the line that called the loop.

    **Returns:**

    A function with the signature of `fn`. Without `fn`, a decorator.

    **Raises:**

    `TypeError` if `fn` or `only` is not callable or a setting is of the wrong type; `ValueError` if
    it has a wrong value, if `checkpoints="all"` and a while loop that is differentiated has no
    bound, if `only` chooses none of the loops, or as `strict` says. The gradient raises
    `ValueError` if `memory` is not enough.

    !!! example

        ```python
        import jax
        import loopkit

        def collatz_like(x):  # jax.grad(collatz_like) raises an error
            return jax.lax.while_loop(lambda x: x < 100.0, lambda x: x * x + x, x)

        print(jax.grad(loopkit.checkpointed(collatz_like))(2.0))  # 5525
        ```
    """
    given: dict[str, Any] = {"max_steps": max_steps, "checkpoints": checkpoints, "memory": memory}
    given |= {"only": only, "strict": strict}
    given |= {"lanes": lanes, "progress": progress, "debug": debug}
    if fn is None:
        decorator: Any = ft.partial(checkpointed, measure=measure, **given)
        return decorator
    validate.check_callable("checkpointed", "fn", fn)
    settings, budget = settings_of("checkpointed", given), None
    measured = validate.check_flag("checkpointed", "measure", measure)
    if isinstance(settings.budget, Bytes):
        budget = Part(**vars(settings.budget), measured=measured)
        settings = replace(settings, budget=budget)
    if measured and (budget is None or budget.host is not None):
        expected = "can be True only if `memory` is a number of bytes"
        advice = 'Pass a budget for one memory, such as `memory="64 MB"`.'
        got = f"memory={memory!r}"
        raise errors.wrong_value("checkpointed", "measure", expected, got, advice)

    @ft.wraps(fn)
    def replaced(*args: P.args, **kwargs: P.kwargs) -> R:
        return _call(fn, settings, args, kwargs)

    return replaced


def _call(fn: Callable, settings: Settings, args: tuple, kwargs: dict) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))
    if any(type(v) is not _jax.ArrayImpl for v in leaves):
        traced_ones = validate.are_traced(args, kwargs)
        leaves = [_jax.as_array(v) if t else v for v, t in zip(leaves, traced_ones, strict=True)]
    types = [type_of(v) if isinstance(v, jax.Array) else None for v in leaves]
    bound = isinstance(fn, MethodType)  # its object may change
    functions, new = [] if bound else [fn], []

    def traced() -> Program:
        new.append(_traced(fn, settings, leaves, tree))
        return new[0].to_keep

    static = [v for v, t in zip(leaves, types, strict=True) if t is None] + [fn] * bound
    owner = [fn.__self__] if isinstance(fn, MethodType) else []
    classes = [v for v in (*static, *owner) if isinstance(v, type)]
    try:
        if not all(map(is_of_library, classes)):
            raise Unknown  # a class may change, as an object may
        exact = _is_plain(tree) and not static
        asked = tuple(_asked(leaves)) if isinstance(settings.budget, Part) else ()
        structure = tree if exact else program_key((tree, static), met=functions)
        key = (settings, *types, structure, asked)
    except Unknown:  # an object that may change
        return _traced(fn, settings, leaves, tree).run(leaves)
    known = remember(functions, key, traced)
    if known.jaxpr is not None:
        return known.run(leaves, again=not new)
    # A function without loops is called as it is, so it reads what it closes over at each call.
    args, kwargs = tree.unflatten(leaves)
    if not any(map(_jax.is_tracer, leaves)):
        return fn(*args, **kwargs)
    if new or known.has_rules:
        return (new or [_traced(fn, settings, leaves, tree)])[0].run(leaves)
    with replacing(settings):
        return fn(*args, **kwargs)


def _asked(values: Sequence[Any]) -> list[bool]:
    """Return in which values a derivative is asked for; in all of them if that is not known."""
    asked = list(map(_jax.is_differentiated, values))
    return asked if any(asked) else [True] * len(asked)


@ft.lru_cache(256)
def _is_plain(tree: PyTree[Any]) -> bool:
    """Return whether every tree that equals this one has nodes of the same types."""
    kind, keys = tree.node_data() or (tuple, ())
    known = kind in (tuple, list) or (kind is dict and all(type(k) is str for k in keys))
    return known and all(map(_is_plain, tree.children()))


RULE_PARTS = 1 / MARGIN, 0.5, 0.2
"""The parts of a budget to try for each loop in a rule for derivatives."""


def _traced(fn: Callable, settings: Settings, leaves: list, tree: _jax.TreeDef) -> Program:
    """Trace a function; its rules have to be traced anew to give their loops another part."""
    first, *fewer = RULE_PARTS
    program = _traced_with(first, fn, settings, leaves, tree)
    for part in fewer:
        if program.has_rules and is_refused(program.jaxpr):
            program = _traced_with(part, fn, settings, leaves, tree)
    return program


def _traced_with(
    part: float, fn: Callable, settings: Settings, leaves: list, tree: _jax.TreeDef
) -> Program:
    out_tree, rest = None, []
    traced = [isinstance(v, jax.Array) for v in leaves]

    def flat(*values: jax.Array) -> list:
        nonlocal out_tree, rest
        args, kwargs = tree.unflatten(spread(values, traced, leaves))
        out, out_tree = jax.tree.flatten(fn(*args, **kwargs))
        rest = [None if isinstance(v, jax.Array) else v for v in out]
        return [v for v in out if isinstance(v, jax.Array)]

    name = getattr(fn, "__name__", "checkpointed")
    with replacing(settings):
        types = list(map(jax.typeof, kept(leaves, traced)))
        jaxpr, consts = _jax.trace(flat, types, name)
    # Remove unused results of loops, as JAX does for its own loops.
    jaxpr, _ = _jax.dce(jaxpr, [True] * len(jaxpr.out_avals), [True] * len(jaxpr.in_avals))
    jaxpr = ready_to_transpose(jaxpr)
    found = list(equations.all_equations(jaxpr))
    has_loops = any("loop" in e.params or e.primitive.name in ("scan", "while") for e in found)
    has_rules = any(map(_jax.has_rules, found))
    if not has_rules:  # loops in rules are traced later
        _check_found(settings, has_loops)
    budget = settings.budget
    if isinstance(budget, Part):  # JAX traces the rules while the program is planned
        each = replace(budget, count=int(part * budget.count), number=None)
        within = with_rules(jaxpr, replace(settings, budget=each))
        jaxpr = with_parts(within, budget, consts, _asked([*consts, *kept(leaves, traced)]))
        changed = has_loops or jaxpr is not within
    else:
        changed, jaxpr = has_loops, with_rules(jaxpr, settings)
    same = interned(jaxpr)
    known = same is not None
    return Program(same or jaxpr, consts, out_tree, rest, changed, has_rules, known)


def _check_found(settings: Settings, has_loops: bool) -> None:
    """Raise if `only` or `strict` requires a loop to replace, and there is none."""
    if has_loops:
        settings.check_chosen()
    elif settings.strict:
        expected, advice = "can be True only where `fn` has a loop of lax", "Leave it out."
        raise errors.wrong_value("checkpointed", "strict", expected, "no loop", advice)


class Program(NamedTuple):
    """A function of arrays, traced, with its loops replaced."""

    jaxpr: Any
    """The traced function; None if it need not run."""
    closed_over: list
    out_tree: Any
    kept: list
    """The results that are not JAX arrays; None in the place of each that is."""
    changed: bool
    """Whether it has loops, or code that runs again in its gradient."""
    has_rules: bool
    """Whether it calls functions with custom derivatives, which may hold loops."""
    known: bool
    """Whether all programs with the same equations share this jaxpr."""

    @property
    def to_keep(self) -> Program:
        """The program to remember: of a function without loops, only that it has none."""
        differentiated = self.has_rules and any(map(_jax.is_tracer, self.closed_over))
        if self.changed or differentiated:
            return self
        return self._replace(jaxpr=None, closed_over=[], kept=[])

    def run(self, leaves: Sequence[Any], again: bool = False) -> Any:
        """Run the program; `again` says whether it ran before."""
        arrays = [v for v in leaves if isinstance(v, jax.Array)]
        values = [*self.closed_over, *arrays]
        as_one = (self.known or again) and _on_one_device(values) and is_pure(self.jaxpr)
        outs = iter((_compiled if as_one else _jax.call_jaxpr)(self.jaxpr)(*values))
        return self.out_tree.unflatten(
            next(outs) if v is None else v.copy() if isinstance(v, np.ndarray) else v
            for v in self.kept
        )


@ft.lru_cache(256)
def _compiled(jaxpr: _jax.Jaxpr) -> Callable:
    return jax.jit(_jax.call_jaxpr(jaxpr))


@ft.lru_cache(256)
def is_pure(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether compiling the program as a whole does not change what it does.

    Such a program has no effects, donates nothing, and moves nothing to other devices or the host.
    """
    for eqn in equations.all_equations(jaxpr):
        budget = getattr(eqn.params.get("loop"), "checkpoints", None)
        moves = eqn.primitive.name == "device_put" or getattr(budget, "host", None)
        if eqn.effects or moves or any(eqn.params.get("donated_invars", ())):
            return False
    return True


def _on_one_device(values: Sequence[Any]) -> bool:
    """Return whether all values are (or stand for) arrays of the same devices, outside jit."""
    if _jax.jit_is_disabled():
        return False
    found = set()
    for v in map(_jax.innermost, values):
        if type(v) is not _jax.ArrayImpl:
            return False
        found.add(v.sharding)
    return len(found) < 2 or len({frozenset(s.device_set) for s in found}) < 2
