"""Steps that check their argument, each in its own way, and loops that take them.

The argument is negative in every step that is not taken.
"""

import functools as ft

import equinox
import jax
import jax.numpy as jnp
from jax import lax

import loopkit

COUNTS = jnp.array([3, 1, 0, 2])
STARTS = jnp.array([2.0, 3.0, 1.5, 4.0])
MOST = 4


def half(x, a):
    return jnp.sin(x) * jnp.sqrt(a)


def plain(x, a):
    return half(half(x, a), a)


def thrown(x, a):
    body = lambda c: (c[0] + 1, half(c[1], jnp.abs(a)))
    goes_on = lambda c: (c[0] < 2) | (a < 0)
    return loopkit.while_loop(goes_on, body, (0, x), max_steps=3, throw=True)[1]


def finite(x, a):
    return loopkit.scan(lambda x, _: (half(x, a), None), x, None, 2, debug="finite")[0]


def finite_while(x, a):
    body = lambda c: (c[0] + 1, half(c[1], a))
    return loopkit.while_loop(lambda c: c[0] < 2, body, (0, x), max_steps=3, debug="finite")[1]


def rows(x, a):
    def body(i, c):
        x, rows = c
        rows = rows.at[jnp.where(a < 0, 5, i)].set(half(x, jnp.abs(a)))
        return rows[jnp.where(a < 0, 5, i)], rows

    start = x, jnp.ones(2)
    return loopkit.fori_loop(0, 2, body, start, buffers=lambda c: c[1], debug="bounds")[0]


def appended(x, a):
    def body(c):
        i, x, kept = c
        x = half(x, jnp.abs(a))
        return i + 1, x, kept.append(x)

    start = 0, x, loopkit.TensorArray.empty(2, x)
    goes_on = lambda c: c[0] < jnp.where(a < 0, 3, 2)
    kept = loopkit.while_loop(goes_on, body, start, max_steps=3)[2]
    return kept.read(1)


def error_if(x, a):
    return plain(equinox.error_if(x, a < 0, "the argument is negative"), jnp.abs(a))


def in_steps(x, a):
    step = lambda _, x: half(equinox.error_if(x, a < 0, "the argument is negative"), jnp.abs(a))
    return loopkit.fori_loop(0, 2, step, x)


def in_call(x, a):
    return jax.jit(error_if)(x, a)


def in_branch(x, a):
    return lax.cond(x > 9.0, lambda: x, lambda: error_if(x, a))


def in_branch_not_taken(x, a):
    return lax.cond(
        a < 0, lambda: x, lambda: equinox.error_if(plain(x, a), a < 0, "the argument is negative")
    )


def in_scan(x, a):
    step = lambda x, a: (
        half(equinox.error_if(x, a < 0, "the argument is negative"), jnp.abs(a)),
        None,
    )
    return lax.scan(step, x, jnp.stack([a, a]))[0]


def in_while(x, a):
    """Differentiable, because the loop itself has no part in the result."""
    x = plain(x, jnp.abs(a))
    step = lambda c: (c[0] + 1, equinox.error_if(c[1], a < 0, "the argument is negative"))
    return x + 0.0 * lax.while_loop(lambda c: c[0] < 2, step, (0, lax.stop_gradient(x)))[1]


def in_checkpoint(x, a):
    return jax.checkpoint(thrown)(x, a)


@jax.custom_jvp
def in_custom_jvp(x, a):
    return thrown(x, a)


@in_custom_jvp.defjvp
def _(primals, tangents):
    thrown(*primals)
    return thrown(*primals), jax.jvp(lambda x, a: plain(x, jnp.abs(a)), primals, tangents)[1]


@jax.custom_vjp
def in_custom_vjp(x, a):
    return thrown(x, a)


in_custom_vjp.defvjp(
    lambda x, a: (thrown(x, a), (x, a)),
    lambda xa, ct: jax.vjp(lambda x, a: plain(x, jnp.abs(a)), *xa)[1](ct),
)


def in_lanes(x, a):
    return jnp.mean(jax.vmap(thrown, (None, 0))(x, jnp.stack([a, a])))


CHECKS = {
    f.__name__: f
    for f in (
        *(thrown, finite, finite_while, rows, appended, error_if, in_steps, in_call, in_branch),
        *(in_branch_not_taken, in_scan, in_while, in_checkpoint, in_lanes),
    )
}
CHECKS |= {"in_custom_jvp": in_custom_jvp, "in_custom_vjp": in_custom_vjp}


def while_loop(step, a, n, **how):
    body = lambda c: (c[0] + 1, step(c[1], argument(a, c[0], n)))
    return loopkit.while_loop(lambda c: c[0] < n, body, (0, a), **how)[1]


def argument(a, t, n):
    return jnp.where(t < n, a + jnp.asarray(t, a.dtype), -1.0)


def fori_loop(step, a, n, **how):
    return loopkit.fori_loop(0, n, lambda t, x: step(x, argument(a, t, n)), a, **how)


def until(step, a, n, **how):
    """A lane takes one step at least, so that of no steps begins with a step that does nothing."""

    def body(x, t):
        return step(x, argument(a, t, jnp.maximum(n, 1))), t

    stop = lambda x, t: t + 1 >= n
    x = loopkit.scan(body, a, jnp.arange(MOST), until=stop, **how)[0]
    return jnp.where(n > 0, x, a)


def unbounded(step, a, n, **how):
    def body(c, _):
        t, x = c
        return (t + 1, step(x, argument(a, t, jnp.maximum(n, 1)))), t

    stop = lambda c, t: c[0] >= n
    x = loopkit.unbounded_scan(body, (0, a), until=stop, segment=2, **how)[0][1]
    return jnp.where(n > 0, x, a)


def blocks(step, a, n):
    """The loop of a truncated gradient, which stops nothing as long as it is."""
    return until(step, a, n, truncate=MOST - 1)


def with_rows(step, a, n):
    """The loop carries a buffer."""

    def body(c):
        t, x, rows = c
        x = step(x, argument(a, t, n))
        return t + 1, x, rows.at[t].set(x)

    start = 0, a, jnp.zeros(MOST)
    how = {"max_steps": MOST, "buffers": lambda c: c[2], "debug": "bounds"}
    _, x, rows = loopkit.while_loop(lambda c: c[0] < n, body, start, **how)
    return jnp.where(n > 0, rows[n - 1], x)


def nested(step, a, n, **how):
    """Outer steps of one inner step each, in a loop of its own."""

    def body(t, x):
        inner = lambda s, x: step(x, argument(a, jnp.where(s < 1, t, n), n))
        return loopkit.fori_loop(0, jnp.where(t < n, 1, 5), inner, x, max_steps=5)

    return loopkit.fori_loop(0, n, body, a, **how)


def nested_scan(step, a, n):
    """The loop between has no predicate."""

    def body(t, x):
        inner = lambda x, _: (step(x, argument(a, t, n)), None)
        return loopkit.scan(inner, x, None, 1)[0]

    return loopkit.fori_loop(0, n, body, a, max_steps=MOST)


def nested_lax(step, a, n):
    """The loop between is one of lax."""

    def body(t, x):
        inner = lambda x, _: (step(x, argument(a, t, n)), None)
        return lax.scan(inner, x, None, 1)[0]

    return loopkit.fori_loop(0, n, body, a, max_steps=MOST)


OUTER = {
    "while": while_loop,
    "while-bounded": ft.partial(while_loop, max_steps=MOST),
    "while-unrolled": ft.partial(while_loop, unroll=3),
    "while-bounded-unrolled": ft.partial(while_loop, max_steps=MOST, unroll=3),
    "while-finite": ft.partial(while_loop, max_steps=MOST, debug="finite"),
    "while-compact": ft.partial(while_loop, max_steps=MOST, lanes="compact"),
    "while-widths": ft.partial(while_loop, lanes=(3, 2, 1)),
    "while-flatten": ft.partial(while_loop, max_steps=MOST, lanes="flatten"),
    "fori": ft.partial(fori_loop, max_steps=MOST),
    "fori-all": ft.partial(fori_loop, max_steps=MOST, checkpoints="all"),
    "fori-segments": ft.partial(fori_loop, max_steps=MOST, checkpoints=2),
    "until": until,
    "until-unrolled": ft.partial(until, unroll=3),
    "until-finite": ft.partial(until, debug="finite"),
    "until-widths": ft.partial(until, lanes=(3, 1)),
    "until-flatten": ft.partial(until, lanes="flatten"),
    "unbounded": unbounded,
    "blocks": blocks,
    "rows": with_rows,
    "nested": ft.partial(nested, max_steps=MOST),
    "nested-widths": ft.partial(nested, lanes=(3, 2, 1)),
    "nested-flatten": ft.partial(nested, max_steps=MOST, lanes="flatten"),
    "nested-scan": nested_scan,
    "nested-lax": nested_lax,
}
OUTSIDE = {"unbounded"}
"""Loops that run outside jit alone."""
