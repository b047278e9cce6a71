"""XLA for CPUs makes one kernel of each loop of small steps in a gradient: nothing is between."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir

import loopkit
from loopkit import Plan
from loopkit._jax import memory

BLOCKS = r" (custom-call|sort|scatter|fft|infeed|outfeed)\("
"""Instructions that XLA does not compile into the kernel of a loop."""
LARGE_COPY = r" \w+\[(?:\d+,)*\d{5,}[\d,]*\]\S* copy\("
"""A copy of an array with an axis of ten thousand or more, which only what is scratch has here."""
MAKES_KERNELS = jax.__version_info__ >= (0, 12)
"""Whether XLA does so without being asked to."""
CHECKPOINTS = [None, "all", 3, Plan(4, 5), Plan(4, 5, "residuals"), Plan(2, 4, thinned=True)]


def kept(bound: int) -> list:
    """Return the settings that a loop can keep things by; without a bound it cannot keep every
    step."""
    pairs = [(checkpoints, most) for checkpoints in CHECKPOINTS for most in (bound, None)]
    return [pair for pair in pairs if pair != ("all", None)]


def computations(text: str) -> dict[str, str]:
    """The computations of a compiled program, by name."""
    found = re.finditer(r"^(?:ENTRY )?(%[\w.-]+) \(.*?^}", text, re.MULTILINE | re.DOTALL)
    return {match[1]: match[0] for match in found}


def within(text: str, name: str) -> str:
    """A computation and all that it calls, as text."""
    programs, found, left = computations(text), {}, [name]
    while left:
        if (name := left.pop()) not in found:
            found[name] = programs[name]
            left += [
                called for called in re.findall(r"%[\w.-]+", found[name]) if called in programs
            ]
    return "\n".join(found.values())


def assert_one_kernel_each(function, *args) -> None:
    text = jax.jit(function).lower(*args).compile().as_text()
    steps = re.findall(r" while\(.*?body=(%[\w.-]+)", text)
    assert steps
    for step in steps:
        assert re.findall(BLOCKS, within(text, step)) == []
        assert re.findall(LARGE_COPY, within(text, step)) == []
    if MAKES_KERNELS:
        assert text.count('xla_cpu_small_call="true"') == len(steps)


def halved(x, checkpoints, bound):
    """Take steps of a loop that may stop early."""
    return loopkit.while_loop(
        lambda x: x > 0.1, lambda x: x * jnp.cos(x) / 2, x, max_steps=bound, checkpoints=checkpoints
    )


def nested(x, checkpoints, bound):
    """Twenty steps, each of which runs a loop: by a loop of loopkit with a predicate."""

    def step(carry):
        x, number = carry
        return jnp.sin(3 * x) + halved(x, checkpoints, bound), number + 1

    most = None if bound is None else 20
    loop = lambda x: loopkit.while_loop(
        lambda c: c[1] < 20, step, (x, 0), max_steps=most, checkpoints=checkpoints
    )
    return loop(x)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoints", "bound"), kept(20_000))
def test_loops_in_steps(checkpoints, bound):
    """The bound is of more bytes than are filled with zeros."""
    assert_one_kernel_each(jax.grad(lambda x: nested(x, checkpoints, bound)), 0.7)


@pytest.mark.parametrize("checkpoints", [None, "all", 3], ids=str)
def test_scans_in_scans(checkpoints):
    def loss(x):
        inner = lambda x: loopkit.scan(lambda c, _: (jnp.sin(c) * x, None), x, None, 9)[0]
        step = lambda c, _: (jnp.cos(c) + inner(c), c)
        return loopkit.scan(step, x, None, 30, checkpoints=checkpoints)[1].sum()

    assert_one_kernel_each(jax.grad(loss), 0.3)


@pytest.mark.parametrize("checkpoints", [None, "all", 3], ids=str)
def test_loops_of_lax(checkpoints):
    def loss(x):
        inner = lambda c: jax.lax.fori_loop(0, 9, lambda _, c: jnp.sin(c) * x, c)
        return jax.lax.scan(lambda c, _: (jnp.cos(c) + inner(c), c), x, None, 30)[1].sum()

    assert_one_kernel_each(jax.grad(loopkit.checkpointed(loss, checkpoints=checkpoints)), 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, "all", 3], ids=str)
def test_buffers(checkpoints):
    def loss(x):
        def write(carry):
            buffer, at, x = carry
            return buffer.at[at].set(jnp.sin(x) * buffer[at]), at + 1, jnp.cos(x)

        def step(carry, _):
            buffer, x = carry
            start = loopkit.Buffer(buffer), 0, x
            filled, _, x = loopkit.while_loop(
                lambda c: (c[1] < 10) & (c[2] > -2), write, start, max_steps=10
            )
            return (jnp.asarray(filled.value if hasattr(filled, "value") else filled), x), None

        first = jnp.linspace(1.0, 2.0, 12), x
        buffer, x = loopkit.scan(step, first, None, 20, checkpoints=checkpoints)[0]
        return buffer.sum() + x

    assert_one_kernel_each(jax.grad(loss), 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, "all", 3], ids=str)
def test_lanes(checkpoints):
    gradient = jax.vmap(jax.grad(lambda x: nested(x, checkpoints, 50)))
    assert_one_kernel_each(gradient, jnp.linspace(0.2, 0.9, 4))


def test_somebody_elses_loop_around():
    """A loop of lax that takes steps along a gradient."""

    def fitted(x):
        gradient = jax.grad(lambda x: nested(x, None, 100))
        return jax.lax.fori_loop(0, 10, lambda _, x: x - 0.1 * gradient(x), x)

    assert_one_kernel_each(fitted, 0.7)


POISON = {"nan": jnp.nan, "large": 1e300}


@pytest.fixture(params=POISON.values(), ids=POISON)
def poisoned(request, monkeypatch):
    """Memory that is taken as it is found holds this."""

    zeros = memory._lower_zeros_after

    def lower(ctx, after, *, shape, dtype, **how):
        if not how["found"]:
            return zeros(ctx, after, shape=shape, dtype=dtype, **how)
        value = request.param if jnp.issubdtype(dtype, jnp.inexact) else 2
        fill = lambda _: jnp.full(shape, value, dtype)
        return mlir.lower_fun(fill, multiple_results=False)(ctx, after)

    jax.clear_caches()
    monkeypatch.setattr(memory, "_lower_zeros_after", lower)
    yield
    jax.clear_caches()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("checkpoints", "bound"), kept(50))
def test_steps_read_nothing_that_others_left(poisoned, checkpoints, bound):
    """The inner loop takes other numbers of steps in each step of the loop around."""

    def written_out(x):
        c, i = x, 0
        while i < 20:
            y = c
            while y > 0.1:
                y = y * jnp.cos(y) / 2
            c, i = jnp.sin(3 * c) + y, i + 1
        return c

    def gradients(x):
        first = jax.grad(lambda x: nested(x, checkpoints, bound))
        return first(x), jax.grad(first)(x)

    want = jax.grad(written_out)(0.7), jax.grad(jax.grad(written_out))(0.7)
    got = jax.jit(gradients)(0.7)
    assert jnp.allclose(jnp.array(got), jnp.array(want), rtol=1e-10, atol=0)
