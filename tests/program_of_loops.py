"""A program of loops with its arguments: by any loops, of one vector, and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from reference_loops import LoopkitLoops, PythonLoops
from trials.in_numpy import eagerly


@dataclass(frozen=True)
class Problem:
    name: str
    program: Callable
    args: tuple
    bound: int = 9
    """More steps than any of its loops takes."""
    tags: frozenset[str] = frozenset()

    def loop(self, checkpoints: Any = None, **options: Any) -> Callable:
        return self.through(LoopkitLoops(self.bound, checkpoints, **options))

    def through(self, loops: Any) -> Callable:
        return lambda *args: self.program(loops, *args)

    def reference(self, *args: Any) -> Callable:
        """The program near `args` (its own by default), where it takes as many steps as there."""
        recording = PythonLoops()
        with eagerly():  # XLA would compile each operation
            self.program(recording, *(args or self.args))
        # A fresh one for each call: it goes through its counts.
        return lambda *args: self.program(PythonLoops(recording.counts), *args)

    def vector(self) -> jax.Array:
        """All arguments in one vector."""
        return ravel_pytree(self.args)[0]

    def flat(self, fun: Callable) -> Callable:
        """`fun` from a vector of its arguments to a vector of its inexact results."""
        unravel = ravel_pytree(self.args)[1]
        return lambda x: inexact_vector(fun(*unravel(x)))

    def flat_loop(self, checkpoints: Any = None, **options: Any) -> Callable:
        return self.flat(self.loop(checkpoints, **options))

    def flat_reference(self, x: jax.Array | None = None) -> Callable:
        args = () if x is None else ravel_pytree(self.args)[1](x)
        return self.flat(self.reference(*args))


def inexact_vector(tree: Any) -> jax.Array:
    """Every inexact leaf, the real and imaginary parts of complex ones, in one vector."""
    parts = []
    for leaf in jax.tree.leaves(tree):
        if jnp.iscomplexobj(leaf):
            parts += [leaf.real, leaf.imag]
        elif jnp.issubdtype(leaf.dtype, jnp.inexact):
            parts.append(leaf)
    return jnp.concatenate([part.ravel() for part in parts])
