"""The three loops under one interface: loopkit's, and lax's and Python's to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import loopkit


class LoopkitLoops:
    """loopkit's loops, with keyword arguments that a program does not give itself."""

    def __init__(
        self, bound: int, checkpoints: Any = None, max_steps: int | None = None, **options: Any
    ):
        self.options = {"checkpoints": checkpoints, **options}
        keeps_all = checkpoints == "all" or getattr(checkpoints, "keeps_all", False)
        if keeps_all and max_steps is None:
            max_steps = bound  # saving every step needs to know how many there can be
        self.bound = {} if max_steps is None else {"max_steps": max_steps}

    def while_loop(self, *args, **kwargs):
        return loopkit.while_loop(*args, **{**self.bound, **self.options, **kwargs})

    def scan(self, *args, **kwargs):
        return loopkit.scan(*args, **{**self.options, **kwargs})

    def fori_loop(self, lower, upper, body_fun, init_val, **kwargs):
        bound = {} if isinstance(upper, int) else self.bound
        kwargs = {**bound, **self.options, **kwargs}
        return loopkit.fori_loop(lower, upper, body_fun, init_val, **kwargs)


class LaxLoops:
    """lax's loops, where they can do what is asked; a buffer is an array."""

    def while_loop(self, cond_fun, body_fun, init_val, *, buffers=None):
        return lax.while_loop(cond_fun, body_fun, init_val)

    def scan(self, f, init, xs=None, length=None, reverse=False, *, buffers=None):
        return lax.scan(f, init, xs, length, reverse)

    def fori_loop(self, lower, upper, body_fun, init_val, *, buffers=None):
        return lax.fori_loop(lower, upper, body_fun, init_val)


class PythonLoops:
    """The reference semantics, for concrete values.

    Without `counts` predicates are read, and the steps of each loop noted in the order in which the
    loops start. `counts` repeats those numbers and no predicate is read, so that the
    values may be tracers.
    """

    def __init__(self, counts: list[int] | None = None):
        self.replayed = None if counts is None else iter(counts)
        self.counts: list[int] = []

    def steps(self, goes_on: Callable[[int], bool]) -> Iterator[int]:
        if self.replayed is not None:
            yield from range(next(self.replayed))
            return
        place = len(self.counts)
        self.counts.append(0)
        while goes_on(self.counts[place]):
            yield self.counts[place]
            self.counts[place] += 1

    def while_loop(
        self, cond_fun, body_fun, init_val, *, max_steps=None, buffers=None, return_info=False
    ):
        carry, taken = jax.tree.map(jnp.asarray, init_val), 0

        def goes_on(step: int) -> bool:
            return (max_steps is None or step < max_steps) and bool(cond_fun(carry))

        for _ in self.steps(goes_on):
            carry, taken = body_fun(carry), taken + 1
        info = loopkit.LoopInfo(jnp.asarray(taken, "int32"), ~cond_fun(carry))
        return (carry, info) if return_info else carry

    def scan(
        self,
        f,
        init,
        xs=None,
        length=None,
        reverse=False,
        *,
        until=None,
        buffers=None,
        return_info=False,
    ):
        carry = jax.tree.map(jnp.asarray, init)
        length = length if length is not None else len(jax.tree.leaves(xs)[0])
        rows: dict[int, Any] = {}
        done = jnp.asarray(False)

        def goes_on(step: int) -> bool:
            return step < length and not done

        for step in self.steps(goes_on):
            row = length - 1 - step if reverse else step
            carry, y = f(carry, row_of(xs, row))
            rows[row] = y
            done = jnp.asarray(False) if until is None else until(carry, y)
        blank = jax.tree.map(jnp.zeros_like, next(iter(rows.values())))
        ys = jax.tree.map(lambda *y: jnp.stack(y), *(rows.get(row, blank) for row in range(length)))
        info = loopkit.LoopInfo(jnp.asarray(len(rows), "int32"), done)
        return (carry, ys, info) if return_info else (carry, ys)

    def fori_loop(self, lower, upper, body_fun, init_val, *, max_steps=None, return_info=False):
        (_, carry), info = self.while_loop(
            lambda state: state[0] < upper,
            lambda state: (state[0] + 1, body_fun(*state)),
            (lower, init_val),
            max_steps=max_steps,
            return_info=True,
        )
        return (carry, info) if return_info else carry


def row_of(xs: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row], xs)
