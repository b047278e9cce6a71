"""Estimated costs of equations."""

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax

from loopkit._jaxprs import prices
from loopkit._jaxprs.cost import nanoseconds

RUN_JAXPRS = """
    call checkpoint closed_call composite cond core_call custom_jvp_call custom_lin
    custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr eval_jaxpr jit pjit remat remat2
    run_state scan while xla_call xla_pmap
"""
"""Primitives that cost what their jaxprs do."""


def primitives():
    rooms = lax, lax.linalg, jax.extend.core.primitives
    found = [getattr(room, name) for room in rooms for name in dir(room)]
    return sorted({p.name for p in found if isinstance(p, jax.extend.core.Primitive)})


def test_each_primitive_has_a_price():
    priced = {*prices.KNOWN, *RUN_JAXPRS.split()}
    assert len(primitives()) > 100
    assert set(primitives()) <= priced


def test_no_primitive_has_two_prices():
    places = [prices.MEASURES, *map(str.split, prices._PRICES), RUN_JAXPRS.split()]
    assert sum(map(len, places)) == len(set().union(*places))


def predicted(f, *shapes):
    return nanoseconds(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)))


def image(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def random_bits(x):
    return jax.random.bits(jax.random.key(0), x.shape, "uint32")


MEASURED = {
    "a few numbers": (jnp.cos, [(1,)], 14),
    "many numbers": (jnp.tanh, [(65_536,)], 21e3),
    "slow functions": (lax.lgamma, [(4096,)], 62e3),
    "a sum": (jnp.sum, [(1_000_000,)], 310e3),
    "a running sum": (lax.cumsum, [(4096,)], 17e3),
    "a product of small matrices": (jnp.matmul, [(16, 16), (16, 16)], 560),
    "a product of matrices": (jnp.matmul, [(256, 256), (256, 256)], 245e3),
    "a matrix and a vector": (jnp.matmul, [(16, 16), (16,)], 60),
    "a short transform": (jnp.fft.fft, [(256,)], 1780),
    "a long transform": (jnp.fft.rfft, [(65_536,)], 443e3),
    "a sort": (jnp.sort, [(4096,)], 800e3),
    "a sort of rows": (lambda x: lax.sort(x, dimension=1), [(64, 64)], 430e3),
    "a convolution": (image, [(1, 64, 64, 16), (3, 3, 16, 16)], 325e3),
    "a factor": (lax.linalg.cholesky, [(64, 64)], 14.4e3),
    "many factors": (lax.linalg.cholesky, [(256, 4, 4)], 38e3),
    "eigenvectors": (jnp.linalg.eigh, [(64, 64)], 266e3),
    "singular values": (lambda x: jnp.linalg.svd(x, compute_uv=False), [(64, 64)], 182e3),
    "a QR decomposition": (jnp.linalg.qr, [(256, 256)], 1.6e6),
    "numbers at random": (random_bits, [(4096,)], 28e3),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MEASURED)
def test_prices_are_what_was_measured(name):
    """Nanoseconds on one core at 2.1 GHz, jax 0.12: `benchmarks/costs.py` has more."""
    f, shapes, measured = MEASURED[name]
    assert measured / 2 < predicted(f, *shapes) < 2 * measured


def test_an_unknown_primitive_costs_more_than_arithmetic():
    mine = jax.extend.core.Primitive("mine")
    mine.def_abstract_eval(lambda x: x)
    for size in (4, 4000):
        assert predicted(jnp.abs, (size,)) < predicted(mine.bind, (size,))
        assert predicted(mine.bind, (size,)) < predicted(jnp.sort, (100 * size,))


def test_a_reducer_is_run_for_each_element():
    scattered = lambda x: x.at[jnp.arange(x.size)].add(x)
    reduced = lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * b + a, [0])
    for f in (scattered, reduced):
        assert predicted(f, (10_000,)) > 100 * predicted(f, (10,))


def test_wide_numbers_cost_more():
    cost_of = lambda dtype: nanoseconds(
        jax.make_jaxpr(jnp.exp)(jax.ShapeDtypeStruct((999,), dtype))
    )
    assert cost_of("float64") > 1.5 * cost_of("float32")


def test_scans_of_a_length_that_is_not_known():
    """In programs that are exported for any size, they cost what several steps do."""

    def cost(length):
        total = lambda xs: lax.scan(lambda c, x: (jnp.sin(c) * x, None), 0.3, xs)[0]
        return nanoseconds(jax.make_jaxpr(total)(jax.ShapeDtypeStruct((length,), "float64")))

    (n,) = jax.export.symbolic_shape("n")
    assert cost(1) < cost(n) < cost(1000)
