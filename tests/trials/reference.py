"""Programs in Python: loops unrolled, branches chosen, lanes one by one, in float64.

A program runs twice. The first run, on numbers, notes every decision: whether a loop goes on, which
branch is taken. The second repeats the decisions, so that its values may be tracers, and JAX can
differentiate it; what is left is straight-line code, without a loop, branch or `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import loopkit
from trials.rows import is_key, ys_of


class Decisions:
    """The decisions that were made, in order; or those to make."""

    def __init__(self, noise: Any = None, from_start: bool = False):
        self.made: list[int] = []
        self.repeated: Iterator[int] | None = None
        self.noise = noise
        """The part of itself by which every carry is moved at every step: see `compare`."""
        self.from_start = from_start
        """Whether it is moved before the first step, too."""
        self.deciding = True

    def undecided(self, run: Callable) -> Any:
        """Return the result of `run` with nothing decided, where only types are asked for."""
        before, self.deciding = self.deciding, False
        try:
            return run()
        finally:
            self.deciding = before

    def decide(self, what: Any) -> int:
        if not self.deciding:
            return 0
        if self.repeated is not None:
            return next(self.repeated)
        self.made.append(int(what))
        return self.made[-1]

    def begun(self, carry: Any) -> Any:
        return self.moved(carry) if self.from_start else arrays(carry)

    def moved(self, carry: Any) -> Any:
        carry = arrays(carry)
        if self.noise is None:
            return carry

        def move(leaf: Any) -> Any:
            if not is_inexact(leaf):
                return leaf
            signs = jnp.cos(jnp.arange(leaf.size) * 2.3 + leaf.ndim).reshape(leaf.shape)
            return leaf * (1 + self.noise * signs)

        return jax.tree.map(move, carry)


def names(decisions: Decisions) -> dict[str, Any]:
    """Return what a program finds under the names of JAX and loopkit."""
    loops = PythonLoops(decisions)
    own = {"scan": loops.scan, "while_loop": loops.while_loop, "fori_loop": loops.fori_loop}
    listing = {"TensorArray": PythonList, "Buffer": NoBuffer, "Plan": loopkit.Plan}
    listing["checkpointed"] = same
    own_lax = own | {"cond": loops.cond, "switch": loops.switch}
    own_jax = {"jit": same, "checkpoint": same, "vmap": one_by_one}
    own_jax |= {"pure_callback": lambda f, like, *x, **_: jnp.asarray(f(*x), like.dtype)}
    own_jax |= {"debug": Names(None, {"callback": lambda *_: None})}
    return {
        "loops": Names(None, own),
        "io_callback": lambda *_: None,
        "lax": Names(lax, own_lax),
        "jax": Names(jax, own_jax),
        "loopkit": Names(None, own | listing),
    }


class Names:
    """A module, with some of its names meaning something else."""

    def __init__(self, module: Any, own: dict[str, Any]):
        self._module, self._own = module, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._module, name)


class NoBuffer:
    """Buffers are arrays here."""


def same(function: Callable, **_: Any) -> Callable:
    return function


def arrays(tree: Any) -> Any:
    return jax.tree.map(lambda v: v if is_static(v) else jnp.asarray(v), tree)


def is_static(leaf: Any) -> bool:
    """Whether it is not an array, and passes through unchanged."""
    return callable(leaf) or isinstance(leaf, str)


def is_inexact(leaf: Any) -> bool:
    return not is_static(leaf) and jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def row_of(array: Any, axis: int | None, row: int) -> Any:
    return array if axis is None else array[(slice(None),) * (axis % array.ndim) + (row,)]


def per_leaf(axes: Any, tree: Any) -> list[Any]:
    """Axes, or words, that are a prefix of a tree, for each of its leaves."""
    none = lambda v: v is None
    spread = jax.tree.map(
        lambda a, part: [a] * len(jax.tree.leaves(part)), axes, tree, is_leaf=none
    )
    whole = lambda v: isinstance(v, list) and all(isinstance(a, int | str | None) for a in v)
    return [a for part in jax.tree.leaves(spread, is_leaf=whole) for a in part]


def one_by_one(function: Callable, in_axes: Any = 0) -> Callable:
    def run(*args: Any) -> Any:
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        count = next(len(x) for x, a in zip(args, axes, strict=True) if a is not None)
        lane = lambda i: [row_of(x, a, i) for x, a in zip(args, axes, strict=True)]
        outs = [function(*lane(i)) for i in range(count)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    return run


class PythonLoops:
    """Loops that are spelled out."""

    def __init__(self, decisions: Decisions):
        self.decisions = decisions

    def cond(self, pred: Any, true: Callable, false: Callable, *operands: Any) -> Any:
        return (true if self.decisions.decide(pred) else false)(*operands)

    def switch(self, index: Any, branches: list[Callable], *operands: Any) -> Any:
        branch = self.decisions.decide(jnp.clip(jnp.asarray(index), 0, len(branches) - 1))
        return branches[branch](*operands)

    def while_loop(
        self, goes_on: Callable, body: Callable, init: Any, *, max_steps: Any = None, **how: Any
    ) -> Any:
        carry, steps, going = self.decisions.begun(init), 0, None
        while steps != max_steps:
            if not self.decisions.decide(goes_on(carry)):
                break
            carry, steps = self.decisions.moved(body(carry)), steps + 1
        if how.get("return_info"):
            going = self.decisions.decide(goes_on(carry))
            return carry, loopkit.LoopInfo(jnp.int32(steps), jnp.asarray(not going))
        return carry

    def fori_loop(
        self,
        lower: Any,
        upper: Any,
        body: Callable,
        init: Any,
        *,
        max_steps: Any = None,
        **how: Any,
    ) -> Any:
        known = isinstance(lower, int) and isinstance(upper, int)
        carry = self.decisions.begun(init)
        trips = upper - lower if known else self.decisions.decide(jnp.asarray(upper) - lower)
        trips = max(0, trips)
        steps = trips if max_steps is None else min(trips, max_steps)
        for i in range(steps):
            carry = self.decisions.moved(body(jnp.asarray(lower + i, "int32"), carry))
        if how.get("return_info"):
            return carry, loopkit.LoopInfo(jnp.int32(steps), jnp.asarray(steps == trips))
        return carry

    def scan(self, f: Callable, init: Any, xs: Any = None, length: int = 0, **how: Any) -> Any:
        carry, xs = self.decisions.begun(init), arrays(xs)
        leaves, tree = jax.tree.flatten(xs)
        axes = per_leaf(how.get("in_axes", 0), xs)
        until, truncate = how.get("until"), how.get("truncate")
        rows: dict[int, Any] = {}
        stopped = False
        for step in range(length):
            row = length - 1 - step if how.get("reverse") else step
            if truncate and step and step % truncate == 0:
                carry = stop_gradients(carry)
            x = tree.unflatten([row_of(x, a, row) for x, a in zip(leaves, axes, strict=True)])
            carry, rows[row] = f(carry, x)
            carry = self.decisions.moved(carry)
            if until is not None and self.decisions.decide(until(carry, rows[row])):
                stopped = True
                break
        ys = self.stacked(f, carry, leaves, tree, axes, rows, length, how)
        info = loopkit.LoopInfo(jnp.int32(len(rows)), jnp.asarray(stopped))
        return (carry, ys, info) if how.get("return_info") else (carry, ys)

    def stacked(self, f, carry, leaves, tree, axes, rows, length, how) -> Any:
        """The rows that were written; zeros in the place of others."""
        if not rows:
            row = [row_type(x, a) for x, a in zip(leaves, axes, strict=True)]
            of_row = lambda *row: f(carry, tree.unflatten(row))[1]
            types = self.decisions.undecided(lambda: jax.eval_shape(of_row, *row))
            zeros = lambda t: jax.random.key(0) if is_key(t) else jnp.zeros(t.shape, t.dtype)
            y = jax.tree.map(zeros, types)
        else:
            rows = {row: arrays(y) for row, y in rows.items()}
            y = next(iter(rows.values()))
        y_leaves, y_tree = jax.tree.flatten(y)
        taken = [jax.tree.leaves(row) for row in rows.values()]
        axes, words = (per_leaf(how.get(k, v), y) for k, v in (("out_axes", 0), ("reduce", None)))
        window = length, how.get("every"), how.get("reverse", False)
        return y_tree.unflatten(
            ys_of(leaf, [row[at] for row in taken], words[at], axes[at], *window)
            for at, leaf in enumerate(y_leaves)
        )


def row_type(x: Any, axis: int | None) -> Any:
    if axis is None:
        return x
    shape = [n for i, n in enumerate(x.shape) if i != axis % x.ndim]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def stop_gradients(carry: Any) -> Any:
    return jax.tree.map(lambda v: lax.stop_gradient(v) if is_inexact(v) else v, carry)


class PythonList:
    """`loopkit.TensorArray`, with room for a fixed number."""

    def __init__(self, rows: Any, size: Any):
        self.rows, self.size = rows, size

    @staticmethod
    def empty(room: int, like: Any) -> PythonList:
        return PythonList(jnp.zeros((room, *like.shape)), jnp.int32(0))

    def write(self, at: Any, element: Any) -> PythonList:
        size = jnp.maximum(self.size, jnp.asarray(at, "int32") + 1)
        return PythonList(self.rows.at[at].set(element), size)

    def append(self, element: Any) -> PythonList:
        return self.write(self.size, element)

    def read(self, at: Any) -> Any:
        return self.rows[at]

    def stack(self) -> Any:
        used = (jnp.arange(len(self.rows)) < self.size).reshape(-1, *[1] * (self.rows.ndim - 1))
        return jnp.where(used, self.rows, 0.0)


jax.tree_util.register_pytree_node(
    PythonList, lambda v: ((v.rows, v.size), None), lambda _, parts: PythonList(*parts)
)
