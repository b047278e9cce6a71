"""Tolerances of numbers, by their type. A test that asks for less says why.

Both sides do the same arithmetic, in another order or fused otherwise, so they differ by some
roundings. Where large terms cancel that is much of what is left: see `DERIVATIVES`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RELATIVE = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""A complex number is as precise as its parts; what is not inexact is equal."""
DERIVATIVES = 1e-10
"""Relative and absolute, of derivatives of any order, by `derivatives.assert_close`. Those with
fewer bits than double precision are to be equal but for this too: their programs are exact."""
SAME_OPERATIONS = 1e-14
"""In double precision, of the very same operations, alone or in a larger program."""


def tolerance(dtype: Any) -> float:
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return RELATIVE[jnp.finfo(dtype).dtype.name]


def assert_near(got: Any, wanted: Any, *, atol: float = 0.0, what: str = "") -> None:
    """Equal trees, up to what is expected of the less precise of each two numbers."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        g, w = jnp.asarray(g), jnp.asarray(w)
        rtol = max(tolerance(g.dtype), tolerance(w.dtype))
        wide = "complex128" if jnp.issubdtype(g.dtype, jnp.inexact) else None  # bfloat16 too
        g, w = np.asarray(g, wide), np.asarray(w, wide)
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol, err_msg=what)
