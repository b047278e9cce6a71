"""The examples of existing projects, small."""

import pathlib
import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

pytestmark = pytest.mark.slow


def test_tridiagonal():
    pytest.importorskip("numba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tridiagonal
    draws = np.random.default_rng(0)
    a, b, c, d = arrays = tuple(draws.random((50, 7)) for _ in range(4))
    b += 3
    wanted = jnp.linalg.solve(
        jax.vmap(lambda a, b, c: jnp.diag(b) + jnp.diag(a[1:], -1) + jnp.diag(c[:-1], 1))(a, b, c),
        d[..., None],
    )[..., 0]
    in_blocks = loopkit.blocked(tridiagonal.thomas, block=8)
    losses = loopkit.blocked(tridiagonal.loss_of(tridiagonal.thomas), block=8)
    by_rule = partial(tridiagonal.solve, by=partial(loopkit.blocked, block=8))
    losses_by_rule = loopkit.blocked(tridiagonal.loss_of(tridiagonal.solve), block=8)
    for solve in (tridiagonal.as_written, in_blocks, by_rule, tridiagonal.with_numpy):
        assert_close(jnp.asarray(solve(*arrays)), wanted)
    slopes = tridiagonal.gradient(tridiagonal.as_written)(*map(jnp.asarray, arrays))
    for f in (in_blocks, losses, by_rule, losses_by_rule):
        assert_close(tridiagonal.gradient(f)(*map(jnp.asarray, arrays)), slopes)
