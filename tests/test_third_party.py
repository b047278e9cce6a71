"""Loops in other people's code, differentiated and replaced without touching it.

Every library that loops in its own way stands here once. The replaced code has to give what
`jax.grad` of the original gives, or forward mode if that has no gradient.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

pytestmark = pytest.mark.slow


def import_or_skip(name: str):
    """The module, or a skipped test. Its warnings at import are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def assert_gains_a_gradient(f, *args, rtol=1e-7):
    """Reverse mode fails for f itself; with its loops replaced it agrees with forward mode.

    rtol: 1e-7 of the values of solvers, whose steps depend on the last digits.
    """
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(f)(*args)
    along = jax.tree.map(jnp.ones_like, args)
    wanted = jax.jit(lambda *args: jax.jvp(f, args, along))(*args)
    value, gradient = jax.jit(jax.value_and_grad(loopkit.checkpointed(f)))(*args)
    np.testing.assert_allclose((value, jnp.sum(gradient)), wanted, rtol=rtol)


# ---------------------------------------------------------------- jax


def test_jax_random_that_rejects():
    """A Poisson draw is a while loop; here its rate is differentiated through the loop."""

    def rates(key, rate):
        draws = jax.random.poisson(key, rate, (16,))
        return jnp.sum(rate * draws)

    key = jax.random.key(0)
    draws = jax.random.poisson(key, 3.5, (16,))
    assert_close(loopkit.checkpointed(jax.random.poisson)(key, 3.5, (16,)), draws)
    slope = jax.grad(loopkit.checkpointed(rates), 1)(key, 3.5)
    assert_close(slope, jnp.sum(draws) * 1.0)


def test_jax_scipy_optimize():
    optimize = import_or_skip("jax.scipy.optimize")

    def fitted(a):
        def rosenbrock(x):
            return jnp.sum((a - x[:-1]) ** 2 + 10.0 * (x[1:] - x[:-1] ** 2) ** 2)

        return optimize.minimize(rosenbrock, jnp.zeros(2), method="BFGS", tol=1e-9).x.sum()

    assert_gains_a_gradient(fitted, 0.8)


def test_jax_conjugate_gradients():
    """The loop is inside `custom_linear_solve`, whose own derivatives stay in force."""
    matrix = jnp.diag(jnp.arange(1.0, 5.0)) + 0.1

    def solved(b):
        return jnp.sum(jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, b)[0] ** 3)

    b = jnp.arange(4.0)
    assert_close(jax.grad(loopkit.checkpointed(solved))(b), jax.grad(solved)(b))


# ---------------------------------------------------------------- optax


@pytest.mark.exhaustive
def test_optax_lbfgs_with_its_zoom_line_search():
    optax = import_or_skip("optax")

    def fitted(a):
        def loss(x):
            return jnp.sum((x - a) ** 2) + 0.1 * jnp.sum(x**4)

        optimiser = optax.lbfgs(memory_size=1)

        def step(state, _):
            x, rest = state
            value, grad = jax.value_and_grad(loss)(x)
            updates, rest = optimiser.update(grad, rest, x, value=value, grad=grad, value_fn=loss)
            return (optax.apply_updates(x, updates), rest), None

        x = jnp.array([0.3, 0.1])
        return lax.scan(step, (x, optimiser.init(x)), length=3)[0][0].sum()

    assert_gains_a_gradient(fitted, jnp.array([1.0, 2.0]))


# ---------------------------------------------------------------- diffrax


def test_diffrax_with_loops_of_lax():
    """`ForwardMode` solves in a `lax.while_loop`."""
    diffrax = import_or_skip("diffrax")

    def solved(k):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, k: -k * y**3),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=None,
            y0=jnp.array([1.0, 0.5]),
            args=k,
            stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6),
            adjoint=diffrax.ForwardMode(),
            max_steps=200,
        )
        return jnp.sum(solution.ys)

    assert_gains_a_gradient(solved, 1.3)


def test_diffrax_lanes_against_its_own_checkpoints():
    """Solves of different lengths side by side; what they save is written in a loop in the loop.

    Modes that agree to the last digits optimised differ by 1e-11 otherwise, of the step sizes.
    """
    diffrax = import_or_skip("diffrax")

    def solved(adjoint, k):
        def solve(end):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, k: jnp.stack([y[1], -k * jnp.sin(y[0])])),
                diffrax.Tsit5(),
                t0=0.0,
                t1=end,
                dt0=0.1,
                y0=jnp.array([1.0, 0.5]),
                args=k,
                saveat=diffrax.SaveAt(ts=jnp.linspace(end / 5, end, 5)),
                stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6),
                adjoint=adjoint,
                max_steps=200,
            ).ys

        return jnp.sum(jax.vmap(solve)(jnp.array([0.5, 2.0, 8.0])) ** 2)

    def optimized(f):
        return jax.jit(
            f,
            compiler_options={
                "xla_llvm_disable_expensive_passes": False,
                "xla_backend_optimization_level": 3,
            },
        )

    wanted = optimized(jax.grad(lambda k: solved(diffrax.RecursiveCheckpointAdjoint(), k)))(1.3)
    replaced = loopkit.checkpointed(lambda k: solved(diffrax.ForwardMode(), k))
    np.testing.assert_allclose(optimized(jax.grad(replaced))(1.3), wanted, rtol=1e-12)


@pytest.mark.parametrize("count", [2, 70])
def test_solves_side_by_side_with_a_rule_of_their_own(count):
    diffrax = import_or_skip("diffrax")

    def end(y):
        term = diffrax.ODETerm(lambda t, y, _: -y * jnp.sin(5 * t * y))
        how = {"stepsize_controller": diffrax.PIDController(rtol=1e-4, atol=1e-6)}
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y, **how).ys[0]

    loss = lambda ys: jnp.sum(jax.vmap(end)(ys) ** 2)
    ys = jnp.linspace(0.1, 3.0, count)
    wanted = jax.grad(loss)(ys)
    np.testing.assert_allclose(jax.grad(loopkit.checkpointed(loss))(ys), wanted, rtol=1e-9)
    with loopkit.replace_lax_loops():
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(ys), wanted, rtol=1e-9)


# ---------------------------------------------------------------- optimistix


@pytest.mark.parametrize("options", [{}, {"checkpoints": 4}, {"checkpoints": "all"}])
def test_optimistix_iterates(options):
    """An adjoint is given the loop to iterate with: here one of loopkit's."""
    optimistix = import_or_skip("optimistix")

    class Checkpointed(optimistix.AbstractAdjoint):
        def apply(self, primal_fn, rewrite_fn, inputs, tags):
            return primal_fn((*inputs, lambda *a, **kw: loopkit.while_loop(*a, **kw, **options)))

    def found(adjoint, a):
        solver = optimistix.Newton(rtol=1e-12, atol=1e-12)
        away = lambda y, a: y**3 + a * y - 1.0
        return jnp.sum(optimistix.root_find(away, solver, jnp.ones(3), a, adjoint=adjoint).value)

    a = jnp.array([0.5, 1.0, 2.0])
    gradient = lambda adjoint: jax.jit(jax.grad(lambda a: found(adjoint, a)))(a)
    wanted = gradient(optimistix.RecursiveCheckpointAdjoint())
    np.testing.assert_allclose(gradient(Checkpointed()), wanted, rtol=1e-12)


# ---------------------------------------------------------------- flax


def linen_rnn():
    nn = import_or_skip("flax.linen")
    x = jnp.sin(jnp.arange(2 * 12 * 3.0)).reshape(2, 12, 3)
    model = nn.RNN(nn.GRUCell(4, param_dtype=float, dtype=float), reverse=True, keep_order=True)
    params = jax.jit(model.init)(jax.random.key(0), x)
    return params, lambda params: jnp.sum(model.apply(params, x) ** 2)


def nnx_rnn():
    nnx = import_or_skip("flax.nnx")
    x = jnp.sin(jnp.arange(2 * 12 * 3.0)).reshape(2, 12, 3)
    cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0), param_dtype=float, dtype=float)
    graph, params, rest = nnx.split(nnx.RNN(cell), nnx.Param, ...)
    start = jnp.zeros((2, 4)), jnp.zeros((2, 4))

    def loss(params):
        return jnp.sum(nnx.merge(graph, params, rest)(x, initial_carry=start) ** 2)

    return params, loss


@pytest.mark.parametrize("rnn", [linen_rnn, nnx_rnn], ids=lambda rnn: rnn.__name__)
def test_flax_rnn(rnn):
    params, loss = rnn()
    wanted = jax.jit(jax.value_and_grad(loss))(params)
    replaced = loopkit.checkpointed(loss)
    assert "loopkit_while" in str(jax.make_jaxpr(replaced)(params))
    assert_close(jax.jit(jax.value_and_grad(replaced))(params), wanted)
    with loopkit.replace_lax_loops():
        traced = jax.jit(jax.value_and_grad(loss)).trace(params)
    assert "loopkit" in str(traced.jaxpr)
    assert_close(traced.lower().compile()(params), wanted)


# ---------------------------------------------------------------- sampling


def test_numpyro_model_with_a_scan():
    """A hidden Markov process, whose log density scans."""
    numpyro = import_or_skip("numpyro")
    dist = import_or_skip("numpyro.distributions")
    control_flow = import_or_skip("numpyro.contrib.control_flow")
    util = import_or_skip("numpyro.infer.util")
    ys = jnp.sin(jnp.arange(10.0))

    def model():
        drift = numpyro.sample("drift", dist.Normal(0.0, 1.0))

        def transition(x, y):
            x = numpyro.sample("x", dist.Normal(x * 0.9 + drift, 1.0))
            numpyro.sample("y", dist.Normal(x, 0.5), obs=y)
            return x, None

        control_flow.scan(transition, 0.0, ys)

    def log_density(values):
        return util.log_density(model, (), {}, values)[0]

    values = {"drift": jnp.asarray(0.2), "x": jnp.cos(jnp.arange(10.0))}
    wanted = jax.value_and_grad(log_density)(values)
    assert_close(jax.value_and_grad(loopkit.checkpointed(log_density))(values), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own use of jax.numpy
def test_dynamax_likelihood():
    """The likelihood of a hidden Markov model is a scan over the observations."""
    models = import_or_skip("dynamax.hidden_markov_model")
    model = models.GaussianHMM(3, 2)
    params, _ = model.initialize(jax.random.key(0))
    _, observed = model.sample(params, jax.random.key(1), 50)

    def likelihood(params):
        return model.marginal_log_prob(params, observed)

    wanted = jax.jit(jax.value_and_grad(likelihood))(params)
    replaced = loopkit.checkpointed(likelihood)
    assert "loopkit_while" in str(jax.make_jaxpr(replaced)(params))
    assert_close(jax.jit(jax.value_and_grad(replaced))(params), wanted)


def test_blackjax_nuts():
    """One move of the no-U-turn sampler, differentiated in its step size."""
    blackjax = import_or_skip("blackjax")
    start, key = jnp.array([1.0, -0.5]), jax.random.key(1)

    def moved(step_size):
        log_density = lambda x: -jnp.sum(x**2 + 0.3 * x**4)
        sampler = blackjax.nuts(log_density, step_size, jnp.ones(2), max_num_doublings=4)
        return jnp.sum(sampler.step(key, sampler.init(start))[0].position)

    assert_gains_a_gradient(moved, 0.3)
