"""Types of the results of loops, and accepted arguments; the program also runs."""

import dataclasses
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import loopkit
from loopkit import LoopInfo


class Newton(NamedTuple):
    x: Array
    steps: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: Array


def halve(x: Array) -> Array:
    return x / 2


def newton(carry: Newton) -> Newton:
    return carry._replace(x=carry.x - 1, steps=carry.steps + 1)


def pair(carry: tuple[Array, Array]) -> tuple[Array, Array]:
    return carry[0] + 1, jnp.sin(carry[1])


def add(total: Array, x: Array) -> tuple[Array, Array]:
    return total + x, total


ones, rows = jnp.ones(3), jnp.arange(5.0)
state = Newton(jnp.array(3.0), jnp.array(0))


# The carry is what the functions say, or else what the loop begins with.
assert_type(loopkit.while_loop(lambda x: x > 1, halve, 10.0), Array)
assert_type(loopkit.while_loop(lambda x: x > 1, halve, np.float32(10)), Array)
assert_type(loopkit.while_loop(lambda x: (x > 1).any(), halve, np.ones(3)), Array)
assert_type(loopkit.while_loop(lambda x: (x > 1).any(), lambda x: x / 2, ones), Array)
assert_type(loopkit.while_loop(lambda c: c.x > 1, newton, state), Newton)
assert_type(loopkit.while_loop(lambda c: c[0] < 3, pair, (0.0, 1.0)), tuple[Array, Array])
assert_type(
    loopkit.while_loop(lambda s: s.x[0] > 1, lambda s: State(s.x - 1), State(4 * ones)), State
)
assert_type(loopkit.fori_loop(0, 3, lambda _, x: x * 2, ones), Array)
assert_type(loopkit.fori_loop(0, jnp.array(3), lambda _, c: newton(c), state), Newton)

# A float is an array in the loop and after it.
loopkit.while_loop(lambda x: x > 1, lambda x: x / 2, 10.0).sum()
loopkit.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1]), (10.0, ones))[0].sum()
loopkit.fori_loop(0, 3, lambda i, x: x * i, 1.0).astype(int)
loopkit.scan(lambda total, x: (total + x, total), 0.0, rows)[0].sum()
loopkit.scan(lambda c, x: ((c[0] + x, c[1]), c[0].sum()), (0.0, ones), rows)[0][0].sum()

# Steps, with `xs` and without.
assert_type(loopkit.scan(add, 0.0, rows), tuple[Array, Array])
assert_type(loopkit.scan(add, jnp.array(0.0), np.arange(5.0)), tuple[Array, Array])
assert_type(loopkit.scan(lambda x, _: (halve(x), None), ones, length=3), tuple[Array, None])
assert_type(loopkit.scan(lambda x, _: (halve(x), None), ones, None, 3), tuple[Array, None])
loopkit.scan(lambda c, x: (newton(c), {"x": c.x + x}), state, rows, 5, True, 2)[1]["x"].sum()
assert_type(loopkit.scan(lambda _, x: (None, x), None, rows), tuple[None, Array])


class Bar:
    def start(self, total: int | None) -> None:
        pass

    def update(self, steps: int) -> None:
        pass

    def close(self) -> None:
        pass


loopkit.scan(add, 0.0, rows, progress=Bar())

# `return_info=True` gives a tuple, and an unknown bool gives anything.
assert_type(
    loopkit.while_loop(lambda x: x > 1, halve, 10.0, return_info=True), tuple[Array, LoopInfo]
)
assert_type(loopkit.while_loop(lambda x: x > 1, halve, 10.0, return_info=False), Array)
assert_type(loopkit.scan(add, 0.0, rows, return_info=True), tuple[Array, Array, LoopInfo])
assert_type(loopkit.fori_loop(0, 3, lambda _, x: halve(x), ones, return_info=True)[1], LoopInfo)


def either(return_info: bool) -> None:
    loopkit.while_loop(lambda x: x > 1, halve, ones[0], return_info=return_info)
    for _ in loopkit.scan(add, 0.0, rows, return_info=return_info):
        pass


def untyped(x, step):  # type: ignore
    last, rows, info = loopkit.scan(step, x, None, 3, return_info=True)
    assert_type(info, LoopInfo)
    last, rows = loopkit.scan(step, x, rows, until=lambda h, _: h.sum() > 4)
    last, info = loopkit.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, last, return_info=True)
    return loopkit.fori_loop(0, 3, lambda i, x: x * i, last).sum() + info.steps


either(True)
either(False)
untyped(ones, lambda h, _: (h / 2, h))
steps = loopkit.scan(add, 0.0, rows, until=lambda total, _: total > 3, return_info=True)[2].steps
assert_type(steps, Array)

# Settings, and settings that are not known.
loopkit.while_loop(lambda x: x > 1, halve, 10.0, max_steps=9, checkpoints="all", throw=True)
loopkit.while_loop(lambda x: x > 1, halve, 10.0, memory={"device": "64 MB", "host": 1 << 30})
loopkit.scan(add, 0.0, rows, checkpoints=loopkit.Plan(2), unroll=True, in_axes=0)
loopkit.scan(add, 0.0, rows, truncate=2, unroll=2)
assert_type(loopkit.scan(add, 0.0, rows, every=2, reduce="mean"), tuple[Array, Array])
assert_type(loopkit.scan(add, 0.0, rows, debug="finite"), tuple[Array, Array])
assert_type(loopkit.fori_loop(0, 3, lambda _, x: halve(x), ones, progress="line"), Array)
assert_type(loopkit.while_loop(lambda x: x > 1, halve, 10.0, lanes="flatten"), Array)
settings: dict[str, Any] = {"memory": "64 MB"}
loopkit.scan(add, 0.0, rows, **settings)


# Outside jit.
def until(total: Array, _: Array) -> Array:
    return total > 3


assert_type(loopkit.unbounded_scan(add, 0.0, rows, until=until), tuple[Array, Array])
assert_type(
    loopkit.unbounded_scan(add, 0.0, rows, until=until, return_info=True),
    tuple[Array, Array, LoopInfo],
)
assert_type(loopkit.ragged_scan(add, 0.0, [rows, ones]), tuple[Array, list[Array]])
assert_type(
    loopkit.ragged_scan(add, 0.0, [np.ones(3), np.ones(4)], return_info=True),
    tuple[Array, list[Array], LoopInfo],
)
