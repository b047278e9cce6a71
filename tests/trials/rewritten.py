"""Two texts of one program, which agree: under other options, or with every loop in two parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loopkit
from trials.compare import compiled
from trials.draws import Draws
from trials.implementations import Implementation
from trials.in_two import InTwo
from trials.programs import Program, draw_program
from trials.transformations import direction, vector

OPTIONS = "memory", "checkpoints", "_split_transpose", "unroll", "lanes"
"""Those that change no number."""

WAYS = {
    "few": {"checkpoints": 1},
    "some": {"checkpoints": 3},
    "a plan": {"checkpoints": loopkit.Plan(slots=2, segment=2)},
    "rows": {"checkpoints": loopkit.Plan(slots=1, segment=3, store="residuals")},
    "on the host": {"checkpoints": loopkit.Plan(slots=3, host=True)},
    "thinned": {"checkpoints": loopkit.Plan(slots=2, thinned=True)},
    "bytes": {"memory": "50 kB"},
    "a policy": {"checkpoints": jax.checkpoint_policies.dots_saveable, "memory": "50 kB"},
    "unrolled": {"unroll": 2},
    "narrowed": {"lanes": (2, 1)},
}


class Keeping:
    """loopkit's loops, all under these options."""

    def __init__(self, **options: Any):
        self.options = options

    def __getattr__(self, name: str) -> Callable:
        def loop(*args: Any, **how: Any) -> Any:
            own = {k: v for k, v in how.items() if k not in OPTIONS}
            planned = isinstance(self.options.get("checkpoints"), loopkit.Plan)
            given = {} if planned and "truncate" in how else self.options
            return getattr(loopkit, name)(*args, **own, **given)

        return loop


@dataclass(frozen=True, repr=False)
class Rewritten:
    """A program and another text of it, with loops that are made of loopkit's."""

    program: Program
    other: Any
    exact: bool
    """Whether a value is the same to the last bit."""

    def holds(self, _: Implementation) -> bool | None:
        """None if nothing can be said, of what is not finite."""
        x, others = self.program.arguments(1)
        others = {k: v[0] for k, v in others.items()} | {"n": np.int32(7), "m": np.int32(6)}
        (values, derived), (again, found) = (
            self.under(loops, x[0], others) for loops in (Keeping(), self.other)
        )
        if not all(np.isfinite(v).all() for v in derived):
            return None
        near = 1e-8 if self.program.eps == 2.0**-52 else 0.3
        alike = same if self.exact else lambda a, b: close(a, b, near)
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(values), strict=True)
        return all(alike(a, b) for a, b in pairs) and all(map(close, found, derived, [near] * 9))

    def under(self, loops: Any, x: Any, others: Any) -> tuple[Any, list]:
        """Return the program's results, and its derivatives."""
        f = reversible(self.program, self.program.function({"loops": loops}))
        both_ways = "custom_vjp" not in self.program.tags

        def derived(x: Any) -> tuple[Any, list]:
            numbers = lambda x: (lambda outs: (vector(outs), outs))(f(x, others))
            y, pull, outs = jax.vjp(numbers, x, has_aux=True)
            found = [pull(direction(y, 0))[0]]
            if both_ways:
                found.append(jax.jvp(lambda x: numbers(x)[0], (x,), (direction(x, 1),))[1])
            return outs, found

        with compiled(False):
            return jax.jit(derived)(x)


def reversible(program: Program, function: Callable) -> Callable:
    """Return a function of a vector, with a derivative in reverse mode."""
    f = program.of_vector(function)
    return loopkit.checkpointed(f) if "lax's while" in program.tags else f


def same(a: Any, b: Any) -> bool:
    return np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact))


def close(a: Any, b: Any, near: float) -> bool:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return same(a, b)
    return np.allclose(*(np.asarray(v, "complex128") for v in (a, b)), near, near, equal_nan=True)


def draw_kept(d: Draws) -> Rewritten:
    """Under options that change no number."""
    return Rewritten(without_errors(draw_program(d)), Keeping(**WAYS[d.choice(list(WAYS))]), True)


def draw_split(d: Draws) -> Rewritten:
    """Every loop as one of a few steps, and one of the others from where that ended."""
    return Rewritten(without_errors(draw_program(d)), InTwo(d.number(1, 4)), False)


def without_errors(program: Program) -> Program:
    """Return the program without a limit on its steps that raises an error."""
    body = program.body.replace(", throw=True", "")
    return Program(body, program.floats, program.tags, program.counts)
