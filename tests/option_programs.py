"""Small programs with something odd in them: out of bounds, not finite, of few bits, of no length.

Each takes its loops from its first argument, as those of `problems`. Where numbers have few bits
the arithmetic is exact, so that its order does not matter.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from problems import Problem, floats
from reference_loops import PythonLoops

PROGRAMS: dict[str, Problem] = {}
TABLE = np.linspace(0.3, 1.1, 5)


def program(*args, tags="lax"):
    """`tags`: "lax" if lax can differentiate it, "reverse" if nothing has a forward mode."""

    def add(function):
        name = function.__name__
        PROGRAMS[name] = Problem(name, function, floats(args), 9, frozenset(tags.split()))
        return function

    return add


# ---------------------------------------------------------------- indices


@program([0.3, 0.4, 0.5, 0.6], 0.7)
def reads_out_of_bounds(loops, table, x):
    def body(x, i):
        y = table[i + 2] * x + table[i - 6] + table.at[i].get(mode="clip")
        y += table.at[i + 2].get(mode="fill", fill_value=0.5)
        dead = table.at[i + 2].get(mode="fill")
        return y / 3, jnp.where(i + 2 < 4, dead * x, x)

    return loops.scan(body, x, jnp.arange(5))


@program([0.3, 0.4, 0.5, 0.6], 0.7)
def reads_nan_out_of_bounds(loops, table, x):
    return loops.scan(lambda x, i: (jnp.sin(x), x * table.at[i].get(mode="fill")), x, jnp.arange(6))


@program([0.3, 0.4, 0.5, 0.6], 0.7)
def writes_out_of_bounds(loops, rows, x):
    def body(carry, i):
        rows, x = carry
        rows = rows.at[i].add(x, mode="drop").at[2 * i].set(x * rows[i - 2])
        rows = rows.at[i].multiply(x, mode="clip").at[-1 - i].add(0.1)
        return (rows, jnp.sin(x + rows[1])), rows[i]

    return loops.scan(body, (rows, x), jnp.arange(6))


def buffered(loops, rows, xs):
    def body(carry, x):
        i, rows = carry
        first, last = rows[i % 4], rows[-1 - i % 4]
        rows = rows.at[i % 4].set(last * x).at[-1 - i % 4].set(jnp.sin(first))
        rows = rows.at[jnp.array([1, 1, 3])].set(jnp.stack([x, first, last]))
        rows = rows.at[jnp.array([0, 0, 2])].add(x * rows[i % 3])
        rows = rows.at[i].multiply(1.5, mode="drop").at[-2].set(rows[7] + rows[-9])
        return (i + 1, rows), rows[0]

    return loops.scan(body, (0, rows), xs, buffers=lambda carry: carry[1])


@program([0.3, 0.4, 0.5, 0.6], [0.7, 0.2, 0.9, 0.4, 1.1])
def buffer_swaps_and_overwrites(loops, rows, xs):
    return buffered(loops, rows, xs)


@program([0.3, 0.4, 0.5, 0.6], 0.7, tags="")
def buffer_in_a_while_loop(loops, rows, x):
    def body(carry):
        i, x, rows = carry
        rows = rows.at[i % 4].set(rows[i - 1] * x).at[i].add(x)
        return i + 1, x + rows[(i + 2) % 4] * rows[i + 1], rows

    init = (0, x, rows)
    return loops.while_loop(
        lambda carry: carry[1] < 2.0, body, init, buffers=lambda carry: carry[2]
    )


# ---------------------------------------------------------------- not finite


@program(3.0, 0.5)
def overflows(loops, x, w):
    def body(carry, k):
        x, total = carry
        x = jnp.exp(x * (1 + w * k))
        return (x, total + 1 / x), x * w

    return loops.scan(body, (x, w), jnp.arange(5.0))


@program(3.0, 0.5)
def becomes_nan(loops, x, w):
    def body(carry, k):
        x, y = carry
        x = jnp.exp(x * (1 + w * k))
        return (x, y * w), (x - x, jnp.sin(y))

    return loops.scan(body, (x, w), jnp.arange(5.0))


@program([0.0, 0.5, -1.0], 0.9)
def root_at_zero(loops, x, w):
    """The derivative of the root is infinite, and not multiplied by zero only in the second."""

    def body(x, k):
        bare = jnp.where(x > 0, jnp.sqrt(x), 0.0)
        safe = jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)
        return x * w, (bare * k, safe)

    return loops.scan(body, x, jnp.arange(3.0))


@program([0.4, 0.9], 0.6, tags="")
def lanes_that_end_badly(loops, x, w):
    """Beyond its last step the body of a lane is not finite."""

    def lane(x):
        return loops.while_loop(lambda x: x > 0.2, lambda x: jnp.sqrt(x - 0.2) * w, x)

    if isinstance(loops, PythonLoops):
        return jnp.stack([lane(x) for x in x])
    return jax.vmap(lane)(x)


@program([0.3, -0.3], 1.2)
def dead_branches(loops, x, w):
    def body(x, k):
        y = lax.cond(x[0] > 0, lambda x: jnp.log(x[0]) * w, lambda x: jnp.sqrt(x[0]), x)
        z = lax.switch(k, [jnp.sin, lambda x: x * w, lambda x: jnp.log(x + 5) / w], x)
        return z, y

    return loops.scan(body, x, jnp.arange(4))


@program([0.5, 0.5, 0.2], 0.5)
def ties(loops, x, w):
    def body(x, _):
        x = jnp.maximum(x, w * x[::-1]) + jnp.where(x == x.max(), w, x)
        least = jnp.argmin(x)
        return jnp.clip(x, 0.0, 3.0), (x[least] + lax.stop_gradient(x.max()), least)

    return loops.scan(body, x, length=4)


# ---------------------------------------------------------------- types


@program(0.75, 1.5)
def few_bits(loops, x, w):
    init = (x.astype("bfloat16"), x.astype("float16"), x.astype("float32"))

    def body(carry, k):
        a, b, c = carry
        new = (c * 0.5).astype(a.dtype), b + (w * k).astype(b.dtype), a.astype("float32") * 2
        return new, (a, b * 2)

    return loops.scan(body, init, jnp.array([1.0, 2.0, -0.5, 4.0, 1.0]))


@program(0.6, 0.8)
def many_types(loops, x, w):
    key = jax.random.key(3)

    def body(carry, i):
        n, flag, z, key, x, nothing = carry
        draw = jax.random.normal(jax.random.fold_in(key, i), dtype=x.dtype)
        z = z * jnp.exp(1j * x) + z.conj() * w
        x = jnp.where(flag, jnp.sin(x), x * w) + 0.1 * draw
        new = n * 3 + i, (n % 2 == 0) ^ flag, z, jax.random.split(key)[0], x, nothing
        return new, {"real": z.real, "flag": flag, "n": n, "key": key}

    init = jnp.uint8(1), True, lax.complex(x, w), key, x, None
    return loops.scan(body, init, jnp.arange(7, dtype="uint8"))


@program(0.6)
def weak_types(loops, x):
    def body(carry, i):
        a, b, x = carry
        return (a * 1.5, b + 1, x * a), (a, b, x * 0 + 1)

    return loops.scan(body, (0.5, 2, x), None, 5)


# ---------------------------------------------------------------- lengths and directions


@program([0.3, 0.4], 0.7)
def no_step(loops, x, w):
    empty = jnp.zeros((0, 2))
    one = loops.scan(lambda x, y: (x / (w - w), x * y), x, empty)
    return one, loops.fori_loop(3, 2, lambda i, x: x / (w - w), x)


@program([0.3, 0.4], 0.7)
def one_step(loops, x, w):
    one = loops.scan(lambda x, y: (jnp.sin(x * w), x * y), x, w * jnp.ones((1, 2)))
    return one, loops.fori_loop(-3, -2, lambda i, x: x * w * i, x)


@program([0.3, 0.4, 0.1, 0.9, 0.2, 0.6, 0.5], 0.7)
def backwards(loops, xs, w):
    def body(h, x):
        (x, i), row = x
        return jnp.sin(h + x * w) + 0.1 * i, (row * h, h + x)

    rows = jnp.outer(xs, jnp.array([1.0, w]))
    return loops.scan(body, w, ((xs, jnp.arange(7)), rows), reverse=True)


@program(0.3, [0.5, 0.6, 0.2, 0.8, 0.4], tags="")
def until_it_is_large(loops, h, xs):
    def body(h, x):
        return h + jnp.sqrt(1.4 - h) * x, (h, jnp.array([h, x]))

    return loops.scan(body, h, xs, until=lambda h, _: h > 1.1)


# ---------------------------------------------------------------- what bodies call


@program(0.4, 0.9, tags="")
def inner_loops(loops, x, w):
    def body(x, k):
        x = loops.while_loop(lambda x: x < 1.0 + k / 4, lambda x: x + w * jnp.cos(x / 4), x)
        x, ys = loops.scan(lambda x, y: (jnp.sin(x) * y, x * w), x, jnp.arange(1.0, 4.0) * w)
        return loops.fori_loop(0, 2, lambda i, x: x + i * w * ys[i], x), ys

    return loops.scan(body, x, jnp.arange(3.0))


@jax.custom_jvp
def wave(x):
    return jnp.sin(x)


@wave.defjvp
def _(primals, tangents):
    return wave(*primals), jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def thrice(x, w):
    return jnp.sin(x) * w


thrice.defvjp(
    lambda x, w: (thrice(x, w), (x, w)), lambda r, ct: (3 * ct * jnp.cos(r[0]), ct * r[1])
)


@jax.jit
def helper(x):
    return jnp.sum(x * TABLE) + jnp.tanh(x)


@program(0.4, 0.9)
def rules_and_helpers(loops, x, w):
    square, row = w**2, jnp.stack([w, x, w * x])

    def body(x, i):
        y = wave(x * square) + helper(x) / 9
        return jax.checkpoint(lambda y: jnp.sin(y * square) + row[i])(y), lax.stop_gradient(y) * x

    return loops.scan(body, x, jnp.arange(3))


@program(0.4, 0.9, tags="lax reverse")
def rules_without_forward_mode(loops, x, w):
    return loops.scan(lambda x, y: (thrice(x, w) + y, thrice(y, x)), x, w * jnp.arange(5.0))


class Cell(eqx.Module):
    weight: jax.Array
    scale: float = 0.5

    def __call__(self, h, x):
        return jnp.tanh(self.weight * h + self.scale * x), h


@program([0.4, -0.2], [[0.3, 0.1], [0.2, 0.7], [0.5, 0.5], [0.9, 0.2]], tags="")
def bound_methods(loops, w, xs):
    return loops.scan(Cell(w), w**2, xs)


@program([0.4, -0.2], 0.3)
def carries_what_it_does_not_change(loops, x, w):
    def body(carry, i):
        x, w, unused_init, i0 = carry
        return (x * w + i, w, unused_init, i0), (w, i)

    return loops.scan(body, (x, w, x, jnp.int8(7)), jnp.arange(4))
