"""Loops of loopkit in two parts: a few steps, and the others from the carry that these end with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

import loopkit
from loopkit import LoopInfo
from trials.reference import per_leaf, stop_gradients


def silent(how: dict[str, Any]) -> dict[str, Any]:
    """Without what would say of the first part that there is more to come, or zeros empty."""
    finite = {"debug": "finite"} if "finite" in how.get("debug", ()) else {}
    how = {k: v for k, v in how.items() if k not in ("throw", "debug")}
    return how | finite | {"return_info": True}


class InTwo:
    def __init__(self, at: int):
        self.at = at

    def while_loop(
        self,
        goes_on: Callable,
        body: Callable,
        init: Any,
        *,
        max_steps: int | None = None,
        return_info: bool = False,
        **how: Any,
    ) -> Any:
        first, rest = self.divided(max_steps)
        how = silent(how)
        carry, a = loopkit.while_loop(goes_on, body, init, max_steps=first, **how)
        carry, b = loopkit.while_loop(goes_on, body, carry, max_steps=rest, **how)
        return (carry, LoopInfo(a.steps + b.steps, b.stopped)) if return_info else carry

    def fori_loop(
        self,
        lower: int,
        upper: Any,
        body: Callable,
        init: Any,
        *,
        max_steps: int | None = None,
        return_info: bool = False,
        **how: Any,
    ) -> Any:
        first, rest = self.divided(max_steps)
        how = silent(how)
        carry, a = loopkit.fori_loop(lower, upper, body, init, max_steps=first, **how)
        carry, b = loopkit.fori_loop(lower + first, upper, body, carry, max_steps=rest, **how)
        return (carry, LoopInfo(a.steps + b.steps, b.stopped)) if return_info else carry

    def divided(self, steps: int | None) -> tuple[int, int | None]:
        first = self.at if steps is None else min(self.at, steps)
        return first, None if steps is None else steps - first

    def scan(
        self,
        f: Callable,
        init: Any,
        xs: Any,
        length: int,
        *,
        in_axes: Any = 0,
        out_axes: Any = 0,
        reverse: bool = False,
        return_info: bool = False,
        **how: Any,
    ) -> Any:
        whole = math.lcm(how.get("truncate") or 1, how.get("every") or 1)
        first = min(self.at, length) // whole * whole
        how = silent(how)
        leaves, tree = jax.tree.flatten(xs)
        axes = per_leaf(in_axes, xs)

        def part(init: Any, begin: int, end: int) -> Any:
            rows = slice(length - end, length - begin) if reverse else slice(begin, end)
            cut = [x[(slice(None),) * (a % x.ndim) + (rows,)] if a is not None else x
                   for x, a in zip(leaves, axes, strict=True)]  # fmt: skip
            axes_ = {"in_axes": in_axes, "out_axes": out_axes, "reverse": reverse}
            return loopkit.scan(f, init, tree.unflatten(cut), end - begin, **axes_, **how)

        if how.get("reduce") is not None and first in (0, length):  # a mean of nothing is NaN
            return part(init, 0, length)[: 2 + return_info]
        carry, ys, a = part(init, 0, first)
        rest = lambda carry: part(cut_off(carry) if 0 < first < length else carry, first, length)
        cut_off = stop_gradients if how.get("truncate") else lambda carry: carry
        if how.get("until") is None:
            carry, more, b = rest(carry)
        else:
            types = jax.eval_shape(rest, carry)[1]
            none = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types)
            numbers, static = eqx.partition(carry, eqx.is_array)
            ended = lambda numbers: (numbers, none, LoopInfo(jnp.int32(0), jnp.array(True)))

            def goes_on(numbers: Any) -> tuple:
                after, ys, info = rest(eqx.combine(numbers, static))
                return eqx.filter(after, eqx.is_array), ys, info

            numbers, more, b = lax.cond(a.stopped, ended, goes_on, numbers)
            carry = eqx.combine(numbers, static)
        one = [None if how.get("every") else word for word in per_leaf(how.get("reduce"), ys)]
        parts = zip(per_leaf(out_axes, ys), one, strict=True)
        ways = [word or axis for axis, word in parts]
        ys = joined(ys, more, ways, reverse, a, b)
        info = LoopInfo(a.steps + b.steps, b.stopped)
        return (carry, ys, info) if return_info else (carry, ys)


def joined(ys: Any, more: Any, ways: list, reverse: bool, first: Any, rest: Any) -> Any:
    """Rows of both parts, along an axis; or what both come to. Each part has a LoopInfo."""

    def join(a: Any, b: Any, way: int | str | None) -> Any:
        if way in (None, "last"):
            return jnp.where(rest.steps == 0, a, b)
        if way == "sum":
            return a + b
        if way == "mean":
            parts = a * first.steps.astype(a.dtype) + b * rest.steps.astype(b.dtype)
            return parts / (first.steps + rest.steps).astype(parts.dtype)
        return jnp.concatenate([b, a] if reverse else [a, b], way)

    leaves, tree = jax.tree.flatten(ys)
    pairs = zip(leaves, jax.tree.leaves(more), ways, strict=True)
    return tree.unflatten([join(*pair) for pair in pairs])
