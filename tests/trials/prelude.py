"""The prelude of every program: functions that its steps call.

This is text, executed with the names of JAX that the implementation at hand has.
"""

PRELUDE = '''
class Pair(eqx.Module):
    first: Any
    second: Any


class Two(NamedTuple):
    one: Any
    two: Any


class Model(eqx.Module):
    weights: Any
    function: Any
    name: Any


class Quiet:
    """A bar that nobody sees."""

    def start(self, total):
        self.steps = 0

    def update(self, steps):
        self.steps += steps

    def close(self):
        assert self.steps >= 0


TABLE = np.linspace(0.3, 1.1, 5)


def noted(x):
    jax.debug.callback(lambda x: None, x)
    return x


def told_to_host(x):
    io_callback(lambda x: None, None, lax.stop_gradient(x))
    return x


def whole(x, n):
    """An integer from 0 to n that hangs on x."""
    return ((n + 0.99) * jnp.sin(x) ** 2).astype("int32")


def several(x, rows):
    """As many of it, all different."""
    numbers = 1 + jnp.arange(len(rows)).reshape(-1, *[1] * x.ndim)
    return x[None] * numbers.astype(x.dtype)


def fit(x, shape, dtype):
    """What is in an array, in another shape: repeated, or the mean of several."""
    size = int(np.prod(shape))
    if x.size in (1, size):
        return jnp.broadcast_to(jnp.ravel(x), size).reshape(shape).astype(dtype)
    count = -(-x.size // size)
    flat = jnp.concatenate([jnp.ravel(x)] * -(-count * size // x.size))[: count * size]
    return flat.reshape(count, size).mean(0).reshape(shape).astype(dtype)


def rows(n, x, axis=0):
    """n rows made of x, along an axis."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(x, n)
    numbers = jnp.arange(n).reshape(-1, *[1] * x.ndim)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        made = x * (1 + 0.2 * numbers).astype(x.dtype)
    else:
        made = x ^ (numbers % 2 == 0) if x.dtype == bool else x + numbers.astype(x.dtype)
    return jnp.moveaxis(made, 0, axis)


MANY = np.cos(np.arange(3 * 72).reshape(3, 72))


to_many = lambda x: x @ MANY


from_many = lambda x: MANY @ x / 9


large = lambda x: jnp.outer(to_many(x), MANY[0])


@jax.jit
def helper(x):
    return jnp.tanh(x + TABLE[1]) * jnp.sum(TABLE).astype(x.dtype) / 3


@jax.custom_jvp
def wave(x):
    return jnp.sin(x)


@wave.defjvp
def _(primals, tangents):
    return wave(*primals), 2 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_jvp
def mixed(x, y):
    return x * jnp.cos(y)


mixed.defjvps(
    lambda t, out, x, y: t * jnp.cos(y), lambda t, out, x, y: -3 * t * x * jnp.sin(y)
)


@jax.custom_jvp
def looping(x):
    return lax.fori_loop(0, 2, lambda i, y: jnp.sin(y) + 0.1, x)


@looping.defjvp
def _(primals, tangents):
    def step(both, _):
        x, t = both
        return (jnp.sin(x) + 0.1, jnp.cos(x) * t), None

    return lax.scan(step, (primals[0], tangents[0]), None, 2)[0]


@jax.custom_vjp
def thrice(x, w):
    return jnp.sin(x) * w


thrice.defvjp(
    lambda x, w: (jnp.sin(x) * w, (x, w)), lambda r, ct: (3 * ct * jnp.cos(r[0]), ct * r[1])
)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (ct / (1 + ct * ct),))


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(n, x):
    return x * jnp.tanh(x) / n


scaled.defvjp(lambda n, x: (x * jnp.tanh(x) / n, x), lambda n, x, ct: (n * ct * x,))


def host_half(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: x / 2, like, x, vmap_method="sequential")


def sine_at(b, at):
    """`apply`, which has no derivative for arrays."""
    if isinstance(b, loopkit.Buffer):
        return b.at[at].apply(jnp.sin)
    return b.at[at].set(jnp.sin(b[at]))


def write(b, how, at, x, pred, **mode):
    """A write to a buffer under a predicate; to an array too."""
    if isinstance(b, loopkit.Buffer):
        return getattr(b.at[at], how)(x, pred=pred, **mode)
    return jnp.where(pred, getattr(b.at[at], how)(x, **mode), b)
'''
