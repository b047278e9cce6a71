"""First steps with an installed loopkit, with nothing installed beside its dependencies.

python smoke.py VERSION
"""

import importlib.metadata
import importlib.resources
import sys

import jax
import jax.numpy as jnp

import loopkit

version = sys.argv[1]
assert loopkit.__version__ == importlib.metadata.version("loopkit") == version
assert (importlib.resources.files(loopkit) / "py.typed").is_file()


def root(a):
    return loopkit.while_loop(
        lambda x: jnp.abs(x * x - a) > 1e-4 * a, lambda x: (x + a / x) / 2, a, max_steps=50
    )


def powers(x, **options):
    return loopkit.scan(lambda y, _: (x * y, y), 1.0, length=10, **options)[0]


assert jnp.allclose(jax.grad(root)(2.0), 0.35355, atol=1e-4)
assert jnp.allclose(
    jax.vmap(jax.grad(root))(jnp.array([9.0, 4.0])), jnp.array([1 / 6, 0.25]), atol=1e-3
)
assert jnp.allclose(jax.hessian(powers)(1.1), 90 * 1.1**8)
for options in ({"checkpoints": "all"}, {"checkpoints": 3}, {"memory": "1 kB"}):
    assert jnp.allclose(jax.grad(powers)(1.1, **options), 10 * 1.1**9), options
halved = jax.jit(
    lambda x: loopkit.while_loop(lambda x: x > 1, lambda x: x / 2, x, max_steps=9, throw=True)
)
assert jax.grad(halved)(100.0) == 2**-7, "of a loop that could raise an error"
print(f"loopkit {version}, jax {jax.__version__}: installed, and it works")
