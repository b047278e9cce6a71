"""Ranges of integers hold every number that programs make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopkit import _jax
from loopkit._jaxprs.integers import ANY, FAR, LOOKED_AT, Range, follow, range_of, ranges_after

OF_TWO = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "div": lambda a, b: lax.div(a, b | 1),
    "div by what is positive": lambda a, b: lax.div(a, lax.max(b, b * 0 + 1)),
    "rem": lambda a, b: lax.rem(a, lax.max(b, b * 0 + 1)),
    "shift": lambda a, b: lax.shift_left(lax.max(a, a * 0), lax.clamp(b * 0, b, b * 0 + 7)),
    "select": lambda a, b: jnp.where(a > b, a, b),
    "where": lambda a, b: jnp.where(a > b, a - b, b),
    "clamp": lambda a, b: lax.clamp(b, a, b + b),
    "to other types": lambda a, b: (a.astype("int16") * b.astype("int16")).astype("uint8"),
    "to float and back": lambda a, b: (a.astype("float32") * 2).astype(b.dtype),
    "bools": lambda a, b: (a > b).astype(a.dtype) + b,
    "concatenated": lambda a, b: jnp.max(jnp.stack([a, b])),
    "padded": lambda a, b: jnp.min(lax.pad(a[None], b, [(1, 1, 0)])),
    "sliced": lambda a, b: lax.dynamic_slice(jnp.stack([a, b, a]), (b,), (1,))[0],
    "a call": lambda a, b: jax.jit(lambda x: x + 1)(a) - b,
    "a conditional": lambda a, b: lax.cond(a > b, lambda: a, lambda: b + b),
    "iota": lambda a, b: jnp.max(lax.iota(a.dtype, 5)) + a,
    "argmax": lambda a, b: jnp.argmax(jnp.stack([a, b, a])).astype(a.dtype),
    "negative": lambda a, b: -a,
    "a logarithm": lambda a, b: lax.population_count(a),
}


def followed(f, ranges, dtypes):
    avals = [jax.typeof(jnp.zeros((), d)) for d in dtypes]
    jaxpr = _jax.trace_closed(lambda *values: [f(*values)], avals, "f")
    return follow(jaxpr, ranges, lambda eqn, ins: (eqn, ranges_after(eqn, ins)))[1][0]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", OF_TWO)
def test_every_number_is_in_the_range(name, dtype):
    f, random, holds = OF_TWO[name], np.random.default_rng(0), jnp.iinfo(dtype)
    table = np.arange(holds.min, holds.max + 1).astype(dtype)
    of_all = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))(table, table)
    of_all = np.asarray(of_all).astype(int)
    for width in (1, 3, 12, 256) * 8:
        first = random.integers(0, 257 - width, 2)
        lows = first + int(holds.min)
        ranges = [Range(int(low), int(low) + width - 1) for low in lows]
        low, high = followed(f, ranges, [dtype, dtype])
        (i, j), found = first, of_all
        found = found[i : i + width, j : j + width]
        assert low is None or low <= found.min(), (ranges, low, high)
        assert high is None or found.max() <= high, (ranges, low, high)


def test_ranges_are_as_small_as_they_can_be():
    of = lambda f, *ranges: followed(f, ranges, ["int32"] * len(ranges))
    five = Range(2, 5)
    assert of(lax.add, five, Range(-1, 7)) == Range(1, 12)
    assert of(lax.sub, five, Range(-1, 7)) == Range(-5, 6)
    assert of(lax.mul, five, Range(-1, 7)) == Range(-5, 35)
    assert of(lax.max, five, Range(3)) == Range(3)
    assert of(lax.min, five, ANY) == Range(high=5)
    assert of(lambda a: jnp.clip(a, 0, 9), ANY) == Range(0, 9)
    assert of(lambda a: lax.rem(a, 0 * a + 4), five) == Range(0, 3)
    assert of(lambda a: jnp.left_shift(1, a), five) == Range(4, 32)
    assert of(lambda a: jnp.left_shift(1, a), Range(0, 31)) == ANY  # 1 << 31 is negative


def test_counters():
    of = lambda f, *ranges: followed(f, ranges, ["int32"] * len(ranges))
    assert of(lambda a: a + 1, Range(3)) == Range(4)
    assert of(lambda a: 1 + a, Range(FAR - 1)) == Range(FAR)
    assert of(lambda a: a + 1, Range(FAR)) == ANY
    assert of(lambda a: a + 2, Range(3)) == ANY
    assert of(lambda a: a + 1, Range(-1)) == ANY
    assert of(lambda a: a.astype("uint32"), Range(3)) == Range(3)
    assert of(lambda a: a.astype("int16"), Range(3)) == ANY
    assert followed(lambda a: a + np.int16(1), [Range(3)], ["int16"]) == ANY


def test_of_arrays():
    assert range_of(np.array([3, -1, 2])) == Range(-1, 3)
    assert range_of(np.int8(3)) == range_of(3) == range_of(jnp.int32(3)) == Range(3, 3)
    assert range_of(np.array([False, True])) == Range(0, 1)
    assert range_of(np.zeros(LOOKED_AT + 1, int)) == range_of(np.zeros(0, int)) == ANY
    assert range_of(jnp.arange(3)) == range_of(1.0) == range_of(jax.random.key(0)) == ANY


def test_of_tracers():
    found = []
    look = lambda *values: found.extend(map(range_of, values))

    def f(x, n):
        numbers = jnp.array([4, 9], np.int32)
        look(x, n, numbers, jnp.clip(n, 1, 7), jnp.where(n > 3, numbers, 1), jnp.arange(3) * 2)
        many = n
        for _ in range(10_000):
            many = lax.min(many, many)
        look(many)
        jax.vmap(lambda v: look(jnp.minimum(v, 4)))(numbers)
        jax.jvp(lambda v: (look(jnp.maximum(n, 5)), v)[1], (x,), (x,))
        return x

    jax.make_jaxpr(f)(1.0, jnp.int32(2))
    of_n = [ANY, ANY, Range(4, 9), Range(1, 7), Range(1, 9), Range(0, 4)]
    assert found == [*of_n, ANY, Range(4, 4), Range(5)]
