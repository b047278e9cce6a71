"""Checks of programs of other libraries, by forward mode of the same unchanged program.

`lax.while_loop` has forward mode, of any order, so what it says is independent of loopkit. The
directional derivatives of the program with its loops replaced have to agree, in double precision,
whichever way they are taken.
"""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit


def import_or_skip(name: str) -> Any:
    """The module, or a skipped test. Their warnings at import are their own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def of_benchmarks(name: str) -> Any:
    """A module of programs there; the folder is on the path no longer than to import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        return importlib.import_module(name)


def direction(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.cos(1.7 * jnp.arange(jnp.size(x))).reshape(x.shape), like)


def dot(a: Any, b: Any) -> jax.Array:
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def slope(f: Callable, v: Any) -> Callable:
    return lambda x: jax.jvp(f, (x,), (v,))[1]


def expected(loss: Callable, at: Any, order: int) -> dict[str, jax.Array]:
    """Value, slope, and curvature of the program as it is, along one direction."""
    v = direction(at)
    names = ["value", "first", "second"][: order + 1]

    def by_forward_mode(x):
        found, f = [], loss
        for _ in names:
            found.append(f(x))
            f = slope(f, v)
        return dict(zip(names, found, strict=True))

    return jax.jit(by_forward_mode)(at)


def found(loss: Callable, at: Any, order: int, **how: Any) -> dict[str, dict[str, jax.Array]]:
    """Return the derivatives through `checkpointed`, in every order of the two modes that ends in a
    number."""
    f, v = loopkit.checkpointed(loss, **how), direction(at)
    pulled = lambda f: lambda x: dot(jax.grad(f)(x), v)

    def all_ways(x):
        value, gradient = jax.value_and_grad(f)(x)
        ways = {"value": {"r": value}, "first": {"f": slope(f, v)(x), "r": dot(gradient, v)}}
        second = {"fr": slope(pulled(f), v)(x), "rr": pulled(pulled(f))(x)}
        return ways | {"second": second} if order == 2 else ways

    return jax.jit(all_ways)(at)


def assert_agrees(
    loss: Callable, at: Any, order: int = 2, rtol: float = 1e-9, **how: Any
) -> dict[str, jax.Array]:
    """rtol: of the number; steps whose sizes depend on the last digits make more of these.

    Returns what forward mode gives.
    """
    wanted = expected(loss, at, order)
    assert all(np.isfinite(number) for number in wanted.values()), wanted
    for name, ways in found(loss, at, order, **how).items():
        for way, number in ways.items():
            np.testing.assert_allclose(number, wanted[name], rtol, err_msg=f"{name}, {way}")
    return wanted


def assert_leaves_near(got: Any, wanted: Any, rtol: float) -> None:
    """rtol: of the largest number of each leaf."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.all(np.isfinite(w))
        np.testing.assert_allclose(g, w, rtol, rtol * np.max(np.abs(w)))


def assert_as_without_loopkit(
    loss: Callable, at: Any, order: int = 1, rtol: float = 1e-10, **how: Any
) -> Any:
    """For programs without a forward mode: value and gradient are those of reverse mode."""
    v = direction(at)

    def derivatives(f):
        if order == 1:
            return jax.value_and_grad(f)
        return lambda x: (f(x), jax.grad(f)(x), jax.grad(lambda x: dot(jax.grad(f)(x), v))(x))

    wanted = jax.jit(derivatives(loss))(at)
    assert_leaves_near(jax.jit(derivatives(loopkit.checkpointed(loss, **how)))(at), wanted, rtol)
    return wanted
