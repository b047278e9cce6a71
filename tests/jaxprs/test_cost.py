"""What equations are taken to cost."""

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from loopkit._jaxprs.cost import nanoseconds


def test_scans_of_a_length_that_is_not_known():
    """In programs that are exported for any size, they cost what several steps do."""

    def cost(length):
        total = lambda xs: lax.scan(lambda c, x: (jnp.sin(c) * x, None), 0.3, xs)[0]
        return nanoseconds(jax.make_jaxpr(total)(jax.ShapeDtypeStruct((length,), "float64")))

    (n,) = jax.export.symbolic_shape("n")
    assert cost(1) < cost(n) < cost(1000)
