"""Relations that hold for every program: for loops too long to be spelled out.

The same compiled program gives both sides, and no reference is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trials.compare import compiled
from trials.draws import Draws
from trials.implementations import Implementation
from trials.programs import Program, draw_program
from trials.rewritten import reversible, without_errors
from trials.transformations import direction, vector

LANES = 3
CLOSE = {True: 1e-6, False: 0.3}
"""Relative to the sum of absolute values of what is added up: with all bits, with few."""

RELATIONS: dict[str, Callable] = {}
"""Each returns pairs of numbers, or arrays, that are equal; with a scale if not their own."""


def relation(function: Callable) -> Callable:
    RELATIONS[function.__name__] = function
    return function


def dot(a: Any, b: Any) -> tuple[Any, Any]:
    return jnp.vdot(a, b), jnp.vdot(jnp.abs(a), jnp.abs(b))


@relation
def adjoint(g: Callable, x: Any, others: Any) -> list:
    """<w, J v> = <J^T w, v>"""
    f = lambda x: g(x, others)
    v = direction(x, 1)
    y, moved = jax.jvp(f, (x,), (v,))
    w = direction(y, 2)
    (pulled,) = jax.vjp(f, x)[1](w)
    (left, size), (right, other) = dot(w, moved), dot(pulled, v)
    return [(left, right, size + other)]


@relation
def symmetric(g: Callable, x: Any, others: Any) -> list:
    """<u, H v> = <v, H u>, by forward over reverse and reverse over forward."""
    scalar = lambda x: jnp.vdot(*(lambda y: (y, direction(y, 3)))(g(x, others)))
    u, v = direction(x, 1), direction(x, 2)
    h_u = jax.jvp(jax.grad(scalar), (x,), (u,))[1]
    h_v = jax.grad(lambda x: jax.jvp(scalar, (x,), (v,))[1])(x)
    (left, size), (right, other) = dot(v, h_u), dot(u, h_v)
    return [(left, right, size + other)]


@relation
def linear(g: Callable, x: Any, others: Any) -> list:
    """J^T (a w + b z) = a J^T w + b J^T z, and a sum of losses has the sum of their gradients."""
    y, pull = jax.vjp(lambda x: g(x, others), x)
    w, z = direction(y, 1), direction(y, 2)
    parts = [2 * pull(w)[0], -3 * pull(z)[0]]
    return [
        (
            pull(2 * w - 3 * z)[0],
            parts[0] + parts[1],
            sum(jnp.abs(p).max(initial=0.0) for p in parts),
        )
    ]


@relation
def permuted(g: Callable, x: Any, others: Any) -> list:
    """Lanes in another order are those lanes."""
    xs = jnp.stack([x * (1 + 0.1 * k) for k in range(LANES)])
    many = {k: jnp.stack([v, v, v]) for k, v in others.items()}
    many["n"] = jnp.array([2, 0, 5], "int32") * 3
    order = jnp.array([2, 0, 1])

    def gradients(x: Any, o: Any) -> Any:
        return jax.vmap(lambda x, o: jax.vjp(lambda x: g(x, o), x)[1](direction(g(x, o), 0))[0])(
            x, o
        )

    straight = gradients(xs, many)
    turned = gradients(xs[order], {k: v[order] for k, v in many.items()})
    return [(turned, straight[order], jnp.abs(straight).max(initial=0.0) + 1)]


@dataclass(frozen=True)
class Related:
    """A program of long loops, and what is to hold of it."""

    program: Program
    relation: str

    def differences(self, implementation: Implementation) -> list:
        """Return the differences of both sides, relative to their scale."""
        f = reversible(self.program, implementation.function(self.program))
        x, others = self.program.arguments(1)
        others = {k: v[0] for k, v in others.items()} | {"n": np.int32(14), "m": np.int32(11)}
        g = lambda x, o: vector(f(x, o))
        with compiled(False):
            pairs = jax.jit(lambda x, o: RELATIONS[self.relation](g, x, o))(x[0], others)
        return [np.max(np.abs(a - b) / (scale + 1), initial=0.0) for a, b, scale in pairs]

    def holds(self, implementation: Implementation) -> bool | None:
        """None if something in the program is not finite, so that nothing can be said."""
        found = self.differences(implementation)
        if not np.isfinite(found).all():
            return None
        return bool(np.all(np.asarray(found) <= CLOSE[self.program.eps == 2.0**-52]))


def draw_related(d: Draws) -> Related:
    program = without_errors(draw_program(d))
    some = list(RELATIONS)
    if "custom_vjp" in program.tags:
        some = ["linear", "permuted"]
    if "bad branch" in program.tags:
        some = [name for name in some if name != "permuted"]
    return Related(program, d.choice(some))
