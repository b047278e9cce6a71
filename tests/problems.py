"""The loops that every transformation is tested on, each written once.

A program takes its loops from its first argument: `LoopkitLoops`, the library with the keyword
arguments under test, or `PythonLoops`, the reference. What follows are floats (or trees of
them), to be differentiated.

    problem.loop(checkpoints=3)(*problem.args)       through loopkit
    problem.reference()(*problem.args)               through Python's `for`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from program_of_loops import Problem

CHECKPOINTS = (None, 1, 3, "all")


TABLE: dict[str, Problem] = {}


def problem(*args: Any, tags: str = "", bound: int = 9) -> Callable:
    """Adds the decorated program to the table, with these arguments."""

    def add(program: Callable) -> Callable:
        name = program.__name__
        TABLE[name] = Problem(name, program, floats(args), bound, frozenset(tags.split()))
        return program

    return add


def floats(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jnp.asarray(x, "float64"), tree, is_leaf=lambda x: type(x) is list
    )


def named(*names: str) -> list[Problem]:
    return [TABLE[name] for name in names]


def tagged(tag: str) -> list[Problem]:
    return [entry for entry in TABLE.values() if tag in entry.tags]


MATRIX = [[0.4, -0.3, 0.2], [0.1, 0.5, -0.6], [-0.2, 0.3, 0.3]]


# ---------------------------------------------------------------- while loops


@problem(1.3, 1.4, 0.3, tags="core small")
def while_scalar(loops, x, rate, shift):
    return loops.while_loop(lambda x: x < 4.0, lambda x: rate * x + shift * x**2 / 4, x)


@problem([0.1, 0.3, -0.2], MATRIX, 0.6, tags="core")
def while_vector(loops, x, w, size):
    def body(x):
        return x + size * jnp.sin(w @ x + 1.0)

    return loops.while_loop(lambda x: jnp.sum(x**2) < 8.0, body, x)


@problem([1.0, 2.0, 3.0], (10.0, 28.0, 8 / 3))
def rk4_lorenz(loops, x, params):
    sigma, rho, beta = params

    def field(p):
        return jnp.stack(
            [sigma * (p[1] - p[0]), p[0] * (rho - p[2]) - p[1], p[0] * p[1] - beta * p[2]]
        )

    def body(carry):
        time, p = carry
        h = 0.02
        k1 = field(p)
        k2 = field(p + h / 2 * k1)
        k3 = field(p + h / 2 * k2)
        k4 = field(p + h * k3)
        return time + h, p + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return loops.while_loop(lambda carry: carry[0] < 0.07, body, (0.0, x))[1]


@problem([0.5, -0.4, 0.3], MATRIX, [0.1, 0.0, -0.2])
def mlp_recurrence(loops, h, w, b):
    def body(carry):
        step, h = carry
        return step + 1, jnp.tanh(w @ h + b)

    return loops.while_loop(lambda carry: carry[0] < 5, body, (0, h))


@problem(2.0, 3.0)
def newton_root(loops, a, guess):
    def body(carry):
        x, _ = carry
        new = (x + a / x) / 2
        return new, jnp.abs(new - x)

    return loops.while_loop(lambda carry: carry[1] > 1e-4, body, (guess, jnp.inf))[0]


@problem([0.3, 0.8], [0.6, 0.4], tags="small")
def fixed_point(loops, a, guess):
    def cond(x):
        return jnp.max(jnp.abs(jnp.cos(a * x) - x)) > 0.05

    return loops.while_loop(cond, lambda x: jnp.cos(a * x), guess)


@problem(0.5, 0.9)
def reaches_its_bound(loops, x, w):
    """The predicate still holds when `max_steps` ends the loop."""
    return loops.while_loop(lambda x: x < 100.0, lambda x: x + w * jnp.sin(x), x, max_steps=3)


@problem(5.0, 2.0)
def takes_no_step(loops, x, w):
    return loops.while_loop(lambda x: x < 1.0, lambda x: jnp.sqrt(w - 3.0 + x), x)


@problem(0.5, 2.0)
def takes_one_step(loops, x, w):
    return loops.while_loop(lambda x: x < 1.0, lambda x: x * w + 1.0, x)


@problem(0.4, 1.2, 2.5)
def predicate_reads_an_argument(loops, x, w, limit):
    return loops.while_loop(lambda x: x * w < limit, lambda x: x * w + jnp.sin(limit), x)


# ---------------------------------------------------------------- scans and counted loops


@problem([0.2, 0.7], [[0.1, -0.3], [0.5, 0.2], [-0.4, 0.6], [0.3, 0.3]], 0.8, tags="core")
def scan_xs_ys(loops, h, xs, w):
    def body(h, x):
        h = jnp.tanh(w * h + x)
        return h, (h * x, jnp.sum(h))

    return loops.scan(body, h, xs)


@problem(0.2, [0.1, 0.5, -0.4, 0.3, 0.2], {"x": [1.0, 0.5, 0.2, 0.1, 0.7]})
def scan_reverse(loops, h, xs, more):
    def body(h, x):
        x, tree = x
        return jnp.sin(h + x) * tree["x"], h * x

    return loops.scan(body, h, (xs, more), reverse=True)


@problem(0.2, 0.9)
def scan_without_xs(loops, h, w):
    return loops.scan(lambda h, _: (jnp.sin(w * h) + 0.2, None), h, length=4)


@problem(0.4, [0.5, 0.3, 0.2, 0.6, 0.1, 0.9], 0.7, tags="core small")
def scan_until(loops, h, xs, w):
    def body(h, x):
        h = h + w * jnp.sin(h) * x
        return h, h * x

    return loops.scan(body, h, xs, until=lambda h, _: h > 0.75)


@problem(0.4, [0.5, 0.3, 0.2, 0.6, 0.1], 0.7)
def scan_until_reverse(loops, h, xs, w):
    def body(h, x):
        h = h + w * jnp.sin(h) + x / 9
        return h, {"h": h, "product": h * x}

    return loops.scan(body, h, xs, reverse=True, until=lambda _, y: y["h"] > 1.1)


@problem([0.3, 0.4, 0.5, 0.6, 0.7], 0.2)
def fori_indexes_by_its_counter(loops, table, x):
    def body(i, x):
        return x * table[i] + jnp.sin(i * table[i - 1])

    return loops.fori_loop(1, 5, body, x)


@problem([0.3, 0.4, 0.5, 0.6], 3.2)
def fori_traced_bound(loops, table, limit):
    upper = jnp.floor(limit).astype(int)
    return loops.fori_loop(0, upper, lambda i, x: x * table[i] + limit, jnp.sum(table))


# ---------------------------------------------------------------- carries


class State(eqx.Module):
    position: jax.Array
    velocity: jax.Array
    name: str = eqx.field(static=True)


class Count(NamedTuple):
    step: jax.Array
    limit: jax.Array


@problem({"q": [0.3, 0.4], "p": [0.1, -0.2]}, 0.3)
def carry_of_trees(loops, start, h):
    def body(carry):
        state, (count, nothing) = carry["state"], carry["rest"]
        velocity = state.velocity - h * jnp.sin(state.position)
        state = State(state.position + h * velocity, velocity, state.name)
        return {"state": state, "rest": (count._replace(step=count.step + 1), nothing)}

    def cond(carry):
        return carry["rest"][0].step < carry["rest"][0].limit

    init = {"state": State(start["q"], start["p"], "pendulum"), "rest": (Count(0, 4), None)}
    return loops.while_loop(cond, body, init)


@problem(0.6, 0.8)
def carry_of_mixed_types(loops, x, w):
    """Integers, bools, complex numbers and keys beside the floats."""

    def body(carry):
        step, flag, z, key, x = carry
        key, draw = jax.random.split(key)
        x = jnp.where(flag, x * w, jnp.sin(x)) + 0.1 * jax.random.uniform(draw, dtype=x.dtype)
        z = z * lax.complex(w, x) + z.conj()
        return step + 2, ~flag, z, key, x

    init = (1, True, lax.complex(x, w), jax.random.key(3), x)
    return loops.while_loop(lambda carry: carry[0] < 8, body, init)


@problem(0.6, 0.8)
def dead_leaf(loops, x, w):
    """A leaf that nothing reads; the root of its last value would have an infinite derivative."""

    def body(carry):
        step, x, dead = carry
        return step + 1, jnp.sin(w * x), jnp.sqrt(dead * 0.0 + x - x)

    return loops.while_loop(lambda carry: carry[0] < 3, body, (0, x, w))[1]


@problem(0.6, [0.8, 0.5])
def params_in_the_carry(loops, x, w):
    """Loop-invariant leaves."""

    def body(carry):
        x, w = carry
        return x + w[0] * jnp.cos(w[1] * x), w

    return loops.while_loop(lambda carry: carry[0] < 2.0, body, (x, w))


@problem(0.6, 0.8, 0.5)
def leaves_change_places(loops, a, b, c):
    """A tangent reaches some leaves only after a few steps."""

    def body(carry):
        step, a, b, c = carry
        return step + 1, b, c, jnp.sin(a)

    return loops.while_loop(lambda carry: carry[0] < 5, body, (0, a, b * c, 1.0))


@problem(0.6, 0.8)
def closes_over_tracers(loops, x, w):
    square, table = w**2, jnp.stack([w, x, w * x])

    def body(carry):
        step, y = carry
        return step + 1, jnp.sin(square * y) + table[step]

    return loops.while_loop(lambda carry: carry[1] < square + 0.6, body, (0, x))


@problem(0.6, 0.8)
def stops_gradients(loops, x, w):
    def body(carry):
        step, x, frozen = carry
        x = jnp.sin(x) * lax.stop_gradient(x * w) + w
        return step + 1, x, lax.stop_gradient(frozen + x)

    return loops.while_loop(lambda carry: carry[0] < 4, body, (0, x, w))


# ---------------------------------------------------------------- nested loops


@problem(0.4, 0.9, tags="core")
def while_in_while(loops, x, w):
    """The inner loop takes another number of steps in every step of the outer."""

    def body(carry):
        step, x = carry
        x = loops.while_loop(lambda x: x < 1.0 + step, lambda x: x + w * jnp.cos(x / 4), x)
        return step + 1, x

    return loops.while_loop(lambda carry: carry[0] < 3, body, (0, x))


@problem([0.4, 0.2], [[0.2, 0.5, 0.3], [0.4, 0.1, 0.6]])
def scan_in_while(loops, x, xs):
    def body(carry):
        step, x = carry
        x, ys = loops.scan(lambda x, row: (jnp.sin(x + row[step % 2]), x), x, xs.T)
        return step + 1, x + jnp.sum(ys) / 9

    return loops.while_loop(lambda carry: carry[0] < 2, body, (0, x))


@problem(0.4, [0.5, 0.3, 0.2, 0.6])
def while_in_scan(loops, x, xs):
    def body(x, y):
        x = loops.while_loop(lambda x: x < 1.0, lambda x: x * (1.2 + y), x)
        return x / 2, x * y

    return loops.scan(body, x, xs, until=lambda x, _: x > 0.68)


PROBLEMS = list(TABLE.values())
