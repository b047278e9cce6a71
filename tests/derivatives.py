"""Derivatives of vector functions along fixed directions, in every order of the two modes.

A pattern such as "fr" reads as it is spoken: forward over reverse. Whatever the modes, what comes
out is again a vector function, so that patterns of any length compose.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from problems import TABLE
from tolerances import DERIVATIVES
from trials.in_numpy import evaluate, is_key


def direction(like: jax.Array, seed: int) -> jax.Array:
    return jnp.cos(jnp.arange(float(like.size)) * 1.7 + seed).reshape(like.shape).astype(like.dtype)


def forward(f: Callable, seed: int) -> Callable:
    """x -> J(x) v"""
    return lambda x: jax.jvp(f, (x,), (direction(x, seed),))[1]


def reverse(f: Callable, seed: int) -> Callable:
    """x -> J(x)^T w"""

    def pulled_back(x):
        y, pullback = jax.vjp(f, x)
        return pullback(direction(y, seed))[0]

    return pulled_back


MODES = {"f": forward, "r": reverse}


def derivative(f: Callable, pattern: str) -> Callable:
    for seed, mode in enumerate(reversed(pattern)):
        f = MODES[mode](f, seed)
    return f


def orders(f: Callable, x: jax.Array, second: str) -> dict[str, jax.Array]:
    """The derivatives that are made on the way to a second one, and that one, as one program.

    Each is under its pattern, the value under "". Second is "fr", "rf" or "rr".
    """
    outer, inner = second
    if inner == "f":
        first = lambda x: dict(zip(("", "f"), jax.jvp(f, (x,), (direction(x, 0),)), strict=True))
    else:

        def first(x):
            y, pullback = jax.vjp(f, x)
            return {"": y, "r": pullback(direction(y, 0))[0]}

    if outer == "f":
        found, moves = jax.jvp(first, (x,), (direction(x, 1),))
        return found | {"f": moves[""], second: moves[inner]}
    found, pullback = jax.vjp(first, x)
    return found | {second: pullback({k: direction(v, 1) for k, v in found.items()})[0]}


def in_numpy(f: Callable, *args: Any) -> Any:
    """Compute `f` by NumPy: XLA takes long to compile a loop that is written out."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    found = evaluate(closed, *jax.tree.leaves(args))
    leaves = [leaf if is_key(leaf) else np.asarray(leaf) for leaf in found]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


@ft.cache
def expected_orders(name: str, second: str) -> dict[str, np.ndarray]:
    """The `orders` of a problem's reference at its own arguments."""
    entry = TABLE[name]
    reference = entry.flat_reference()
    return in_numpy(lambda x: orders(reference, x, second), entry.vector())


@ft.cache
def expected(name: str, pattern: str) -> np.ndarray:
    """The derivative of a problem's reference at its own arguments."""
    entry = TABLE[name]
    return in_numpy(derivative(entry.flat_reference(), pattern), entry.vector())


def assert_close(got: Any, wanted: Any, tol: float = DERIVATIVES) -> None:
    """Equal trees, of equal types, up to `tol`, NaN nowhere; keys are compared by their data."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    for g, w in pairs:
        assert jnp.asarray(g).dtype == jnp.asarray(w).dtype
        if jnp.issubdtype(jnp.asarray(g).dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        np.testing.assert_allclose(g, w, rtol=tol, atol=tol, equal_nan=False)
