"""Outside jit the very same functions are traced once, and the same equations compiled once.

Nothing stale is used.
"""

import contextlib
import itertools
import sys

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close
from loopkit import _jax
from loopkit._jaxprs import equations


@contextlib.contextmanager
def calls_of(name):
    """A list that grows by one with every Python call of a function of this name in this file.

    Counted from outside: a body that counts its calls closes over something that changes.
    """
    calls = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name == name and code.co_filename == __file__:
            calls.append(frame.f_lineno)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def body(carry):
    step, x = carry
    return step + 1, jnp.sin(x) * 1.5


def goes_on(carry):
    return carry[0] < 4


def row_body(h, x):
    return jnp.sin(h * x), h


def stops(h, _):
    return jnp.all(h > 5.0)


def while_loop(x):
    return loopkit.while_loop(goes_on, body, (0, x), checkpoints=2)[1]


def while_loop_with_info(x):
    (_, x), info = loopkit.while_loop(goes_on, body, (0, x), max_steps=9, return_info=True)
    return x * info.steps.astype(x.dtype)


def scan(x):
    return loopkit.scan(row_body, x, jnp.ones(4), checkpoints=2)[0]


def stopping_scan(x):
    return loopkit.scan(row_body, x, jnp.ones(4), until=stops)[0]


def counted(i, x):
    return jnp.sin(x) * 1.5 + i


def fori_loop(x):
    return loopkit.fori_loop(0, 4, counted, x)


def fori_loop_to_a_number(x):
    return loopkit.fori_loop(0, jnp.asarray(4), counted, x)


def remade(x):
    """New function objects on every call, which call functions with rules of their own."""
    rate, table = 1.5, TABLE

    def body(carry):
        y = jax.nn.relu(jnp.sin(carry[1])) * rate + with_a_rule(carry[1])
        return carry[0] + 1, y + table[carry[0]]

    return loopkit.while_loop(lambda carry: carry[0] < 4, body, (0, x))[1]


@jax.custom_jvp
def with_a_rule(x):
    return 0.1 * x


with_a_rule.defjvp(lambda primals, tangents: (with_a_rule(*primals), 0.1 * tangents[0]))
TABLE = jnp.arange(4.0)


def scan_of_lax(x):
    return loopkit.scan(row_body, x, TABLE, checkpoints="all")[0]


LOOPS = {
    "while_loop": (while_loop, "body"),
    "while_loop with info": (while_loop_with_info, "body"),
    "predicate": (while_loop, "goes_on"),
    "scan": (scan, "row_body"),
    "scan, every residual": (scan_of_lax, "row_body"),
    "scan with until": (stopping_scan, "row_body"),
    "until": (stopping_scan, "stops"),
    "fori_loop": (fori_loop, "counted"),
    "fori_loop to a bound of an array": (fori_loop_to_a_number, "counted"),
}
TRANSFORMS = {
    "value": lambda f: f,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,)),
    "grad": jax.grad,
    "hessian": jax.hessian,
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_the_second_call_does_not_trace(loop):
    f, name = LOOPS[loop]
    x = jnp.full(3 + list(LOOPS).index(loop), 0.3)  # a shape that no other test has traced
    with calls_of(name) as calls:
        first = f(x)
        assert calls
        calls.clear()
        assert f(x).tolist() == first.tolist()
        f(2 * x)
    assert calls == []


@pytest.mark.parametrize("loop", LOOPS)
def test_the_second_call_walks_through_no_step(loop, monkeypatch):
    f, _ = LOOPS[loop]
    x, walks, walk = jnp.asarray(0.3), [], equations.all_equations
    f(x)
    monkeypatch.setattr(equations, "all_equations", lambda j: walks.append(j) or walk(j))
    f(2 * x)
    assert walks == []


@pytest.mark.parametrize("until", [None, stops])
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_a_truncated_scan_over_large_arrays_is_traced_once(until, transform, monkeypatch):
    traces, trace = [], _jax.trace
    monkeypatch.setattr(_jax, "trace", lambda *args: traces.append(args) or trace(*args))
    # More than a cache keeps alive for a function; as many as no other test has.
    rows = jnp.full(10_000 + 2 * (until is None) + (transform is jax.grad), 0.1)

    def f(x, rows):
        return loopkit.scan(row_body, x, rows, truncate=6000, until=until)[0]

    transform(f)(0.3, rows)
    assert traces
    traces.clear()
    wanted = transform(lambda x: f(x, 2 * rows))
    assert transform(f)(0.3, 2 * rows) == wanted(0.3)
    assert traces == []
    assert transform(f)(0.3, 2 * rows) == jax.jit(wanted)(0.3)


@pytest.mark.exhaustive
def test_truncated_scans_that_differ_are_not_mixed_up():
    row, table = jnp.arange(10.0), jnp.ones(10)

    def loss(h, rate, truncate, axis, reverse):
        step = lambda h, x: (h * rate + x["row"] * x["all"].sum(), h)
        how = {"in_axes": {"row": 0, "all": axis}, "truncate": truncate, "reverse": reverse}
        h, ys = loopkit.scan(step, h, {"row": row, "all": table}, **how)
        return h + ys.sum()

    def in_python(h, rate, truncate, axis, reverse):
        total = 0.0
        for t, x in enumerate(row[::-1] if reverse else row):
            if t and t % truncate == 0:
                h = jax.lax.stop_gradient(h)
            total += h
            h = h * rate + x * (1 if axis == 0 else 10)
        return h + total

    for case in itertools.product((0.5, 0.25), (3, 4), (0, None), (False, True)):
        got = jax.value_and_grad(loss)(1.0, *case)
        assert_close(got, jax.value_and_grad(in_python)(1.0, *case))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", [while_loop], ids=lambda f: f.__name__)
def test_the_second_derivative_does_not_trace(f, transform):
    transformed = TRANSFORMS[transform](f)
    transformed(jnp.asarray(0.3))
    with calls_of("body") as calls:
        transformed(jnp.asarray(0.7))
    assert calls == []


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", [while_loop, stopping_scan, remade], ids=lambda f: f.__name__)
def test_the_second_call_does_not_compile(f, transform, compilations):
    transformed = TRANSFORMS[transform](f)
    x = jnp.asarray(0.3)
    jax.block_until_ready(transformed(x))
    y = jax.block_until_ready(x + 0.4)
    compilations.clear()
    jax.block_until_ready(transformed(y))
    assert compilations == []


def test_lanes_in_a_step_that_is_made_anew(compilations):
    """A new step that holds the same lanes compiles nothing."""

    def f(x):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.5)
        lane = lambda n, x: loopkit.while_loop(lambda c: c[0] < n, step, (0, x), lanes=(2,))[1]
        lanes = jax.vmap(lambda n, x: lane(n, x))
        return loopkit.scan(lambda x, _: (lanes(jnp.arange(4), x), None), x, None, 2)[0]

    x = jnp.linspace(0.1, 0.9, 4)
    first = jax.block_until_ready(f(x))
    compilations.clear()
    assert f(x).tolist() == first.tolist()
    assert compilations == []


@pytest.mark.slow
def test_a_step_is_traced_a_few_times_at_most():
    """Deep nests must not take time exponential in their depth."""

    def nest(depth):
        def innermost(x):
            return jnp.sin(x)

        f = innermost
        for _ in range(depth):
            f = lambda x, f=f: loopkit.scan(lambda x, _: (f(x), None), x, length=2)[0]
        return f

    counts = []
    for depth in (1, 4):
        with calls_of("innermost") as calls:
            jax.grad(nest(depth))(0.3)
        counts.append(len(calls))
    assert counts[1] <= 4 * counts[0]
