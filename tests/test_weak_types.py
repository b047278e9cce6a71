"""Types of results, weak ones told from strong, against lax, wherever it takes the loop."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kinds
import loopkit
from tolerances import tolerance
from turns import in_turn


class State(eqx.Module):
    count: object
    rate: object


INITS = {
    "int": lambda: 1,
    "float": lambda: 1.5,
    "bool": lambda: True,
    "complex": lambda: 1j,
    "int32": lambda: jnp.int32(1),
    "float32": lambda: jnp.float32(1.5),
    "bfloat16": lambda: jnp.bfloat16(1.5),
    "numpy float": lambda: np.float64(1.5),
    "numpy int": lambda: np.int16(2),
    "numpy array": lambda: np.ones(2),
    "weak array": lambda: lax.convert_element_type(jnp.arange(2), float),
    "weak integers": lambda: jnp.broadcast_to(jnp.asarray(1), (2,)),
    "pair": lambda: (1, jnp.float32(2)),
    "three": lambda: (1.5, jnp.bfloat16(2), 2),
    "module": lambda: State(1, jnp.float32(2)),
}


def each(change):
    return lambda carry: jax.tree.map(change, carry)


def swapped(carry):
    leaves, tree = jax.tree.flatten(carry)
    return tree.unflatten(leaves[::-1])


def mixed(carry):
    leaves, tree = jax.tree.flatten(carry)
    return tree.unflatten([sum(leaves) * 1] * len(leaves))


BODIES = {
    "nothing": lambda carry: carry,
    "a half": each(lambda x: x + 0.5),
    "one": each(lambda x: x + 1),
    "float32": each(lambda x: x * jnp.float32(2)),
    "bfloat16": each(lambda x: x * jnp.bfloat16(2)),
    "int16": each(lambda x: x + jnp.int16(1)),
    "complex": each(lambda x: x * 1j),
    "strong one": each(lambda x: x * jnp.ones((), x.dtype)),
    "cast": each(lambda x: lax.convert_element_type(x, x.dtype)),
    "a literal": each(lambda x: x * 0 + 2.0),
    "only a literal": each(lambda x: 2.0 if x.ndim == 0 else x),
    "swapped": swapped,
    "mixed": mixed,
}

YS = {
    "nothing": lambda carry, _: None,
    "constants": lambda carry, _: (1.0, 2, True, 1j, jnp.int16(3), np.float32(4)),
    "promoted": lambda carry, x: jax.tree.map(
        lambda c: (c, c + x, c * 1.5, c * jnp.bfloat16(3)), carry
    ),
    "input": lambda carry, x: (x, x + 1, x * 0.5),
}


def types(tree):
    arrays = [x if hasattr(x, "shape") else jnp.asarray(x) for x in jax.tree.leaves(tree)]
    return [(x.shape, str(x.dtype), x.weak_type) for x in arrays]


def scanning(loops, body, init, ys, length=3, **how):
    xs = jnp.arange(length, dtype="float32")
    return loops.scan(lambda c, x: (body(c), ys(c, x)), init, xs, **how)


def counting(kind, loops, body, init, length=3):
    return kinds.loop(kind, lambda _, c: body(c), init, length, loops=loops)


def counting_to(loops, body, init, length=3):
    return jax.jit(lambda n: counting("fori", loops, body, init, n))(length)


LOOPS = {kind: ft.partial(counting, kind) for kind in ("fori", "while")}
LOOPS |= {"fori to a traced bound": counting_to}


@pytest.mark.slow
@pytest.mark.parametrize(("init", "x64"), in_turn(INITS, [False, True]))
def test_types_are_those_of_lax(init, x64):
    """Those that lax takes; most of them."""
    taken = 0

    def compare(run, *what):
        nonlocal taken
        try:
            want = types(jax.eval_shape(lambda: run(lax)))
        except TypeError:  # the carry cannot be promoted
            return
        taken += 1
        assert types(jax.eval_shape(lambda: run(loopkit))) == want, what

    with jax.enable_x64(x64):
        start = INITS[init]()
        for k, (name, body) in enumerate(BODIES.items()):
            for j, (kind, ys) in enumerate(YS.items()):
                length = (0, 3)[(k + j + x64) % 2]  # the other where `x64` is the other
                run = lambda loops, b=body, y=ys, n=length: scanning(loops, b, start, y, n)
                compare(run, name, kind, length)
            for kind, loop in LOOPS.items():
                compare(lambda loops, b=body, loop=loop: loop(loops, b, start), name, kind)
    assert taken >= 25


# ---------------------------------------------------------------- results

HOW = {
    "as it is": {},
    "reverse": {"reverse": True},
    "unroll 2": {"unroll": 2},
    "unroll 2, reverse": {"unroll": 2, "reverse": True},
    "unrolled": {"unroll": True},
    "one checkpoint": {"checkpoints": 1},
    "all stored": {"checkpoints": "all"},
}
OF_LAX = "reverse", "unroll"
LENGTHS = (False, 3), (True, 3), (True, 1), (False, 0)
"""Pairs: whether `x64` is on, and a length."""
PROMOTED = ("int", "a half"), ("three", "bfloat16"), ("module", "float32"), ("float", "strong one")
PROMOTED += ("weak integers", "bfloat16"), ("float", "only a literal")


def assert_same(got, want):
    assert types(got) == types(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Operations are in the same order, so narrow types agree, too.
        rtol = min(tolerance(a.dtype), tolerance("float32"))
        np.testing.assert_allclose(*(np.asarray(x).astype("complex128") for x in (a, b)), rtol=rtol)


def for_lax(how):
    return {k: v for k, v in how.items() if k in OF_LAX}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("init", "body"), PROMOTED)
def test_results_are_those_of_lax(init, body, how):
    def run(loops, how, length):
        loop = lambda: scanning(loops, BODIES[body], INITS[init](), YS["promoted"], length, **how)
        return loop(), jax.jit(loop)()

    for x64, length in LENGTHS[list(HOW).index(how) % 2 :: 2]:  # in turn
        with jax.enable_x64(x64):
            assert_same(run(loopkit, HOW[how], length), run(lax, for_lax(HOW[how]), length))


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("init", "body"), PROMOTED)
def test_results_of_other_loops(init, body, loop):
    for x64, length in LENGTHS[PROMOTED.index((init, body)) % 2 :: 2]:
        with jax.enable_x64(x64):
            run = lambda loops, n=length: LOOPS[loop](loops, BODIES[body], INITS[init](), n)
            assert_same(run(loopkit), run(lax))


STARTS = {
    "weak": lambda x: x,
    "strong": lambda x: x * jnp.float32(1),
    "integer beside it": lambda x: (1, x),
    "promoted by it": lambda x: State(x, 2),
}
STEPS = {
    "as it is": each(lambda c: jnp.sin(c * 1.5)),
    "strong": each(lambda c: jnp.sin(c) * jnp.float32(1.5)),
    "half": each(lambda c: jnp.sin(c) * jnp.bfloat16(1.5)),
    "mixed": mixed,
    "swapped": lambda c: each(jnp.sin)(swapped(c)),
}
DERIVATIVES = {
    "grad": lambda f: jax.value_and_grad(f),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "second": lambda f: jax.value_and_grad(jax.grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.broadcast_to(x, (2,))),
    "vmap grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.broadcast_to(x, (2,))),
}


@pytest.mark.slow
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("how", ["unroll 2, reverse", "one checkpoint"])
@pytest.mark.parametrize("start", STARTS)
def test_derivatives_are_those_of_lax(start, how, derivative):
    jitted = jax.jit if how == "unroll 2, reverse" else lambda f: f

    def results(loops, how, step):
        def value(x):
            out = scanning(loops, STEPS[step], STARTS[start](x), YS["promoted"], **how)
            return sum(jnp.sum(v) * 1.5 for v in jax.tree.leaves(out))

        return jitted(DERIVATIVES[derivative](value))(0.5)

    for step in STEPS:
        try:
            want = results(lax, for_lax(HOW[how]), step)
        except TypeError:
            continue
        got = results(loopkit, HOW[how], step)
        assert types(got) == types(want), step
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            rounded = "bfloat16" if step == "half" else "float32"  # on the way, whatever comes out
            np.testing.assert_allclose(a, b, rtol=tolerance(rounded))


def test_a_carry_that_cannot_be_promoted_is_refused_as_before():
    text = (
        r"`f` must return a carry of the types of `init`[.] Cast in `f` .* Got:\n  `init`: "
        r"expected float32\[\], got int32\[\]$"
    )
    with pytest.raises(TypeError, match=text):
        loopkit.scan(lambda c, _: (jnp.int32(c), None), jnp.float32(1), None, 2)
    with pytest.raises(
        TypeError, match=r"`body_fun` must.*\n  `init_val`: expected int32\[\], got float"
    ):
        loopkit.fori_loop(0, 2, lambda _, x: x + 0.5, jnp.int32(1))
