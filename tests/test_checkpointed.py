"""The loops of lax inside functions that one cannot edit."""

import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative
from problems import CHECKPOINTS, Problem, named, tagged


class LaxLoops:
    """The loops of lax, for programs that ask for nothing else."""

    while_loop = staticmethod(lax.while_loop)
    scan = staticmethod(lax.scan)
    fori_loop = staticmethod(lax.fori_loop)


PLAIN = named("while_scalar", "while_vector", "scan_xs_ys", "scan_reverse", "while_in_while")
PLAIN += named("fori_traced_bound", "carry_of_mixed_types", "params_in_the_carry")


def with_lax(problem: Problem):
    return problem.flat(lambda *args: problem.program(LaxLoops, *args))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("problem", PLAIN, ids=lambda problem: problem.name)
def test_checkpointed_differentiates_in_reverse(problem: Problem, checkpoints):
    settings = {"checkpoints": checkpoints, "max_steps": problem.bound}
    f = loopkit.checkpointed(with_lax(problem), **settings)
    x = problem.vector()
    assert_close(f(x), problem.flat_reference()(x))
    wanted = derivative(problem.flat_reference(), "r")(x)
    assert_close(jax.jit(derivative(f, "r"))(x), wanted)


@pytest.mark.parametrize("pattern", ["f", "fr", "rf", "rr"])
@pytest.mark.parametrize("problem", tagged("small")[:1], ids=lambda problem: problem.name)
def test_checkpointed_in_other_modes(problem: Problem, pattern):
    x, f = problem.vector(), loopkit.checkpointed(with_lax(problem))
    assert_close(derivative(f, pattern)(x), derivative(problem.flat_reference(), pattern)(x))


def grows(x):
    return lax.while_loop(lambda x: x < 30.0, lambda x: x * x + 1.0, x)


GROWN = jax.grad(lambda x: ((x * x + 1.0) ** 2 + 1.0) ** 2 + 1.0)


def test_loops_inside_calls_of_every_kind():
    calls = {
        "jit": jax.jit(grows),
        "cond": lambda x: lax.cond(x > 0, grows, jnp.cos, x),
        "checkpoint": jax.checkpoint(grows),
        "scan": lambda x: lax.scan(lambda c, _: (grows(c), None), x, length=1)[0],
        "vmap": lambda x: jax.vmap(grows)(x[None])[0],
        "grad inside": lambda x: jax.grad(grows)(x) + 0 * x,
    }
    wanted = {name: GROWN(1.5) for name in calls}
    wanted["grad inside"] = jax.grad(GROWN)(1.5)
    got = {name: jax.grad(loopkit.checkpointed(f))(1.5) for name, f in calls.items()}
    assert_close(got, wanted)


def test_loops_inside_custom_derivatives():
    @jax.custom_jvp
    def f(x):
        return grows(x)

    @f.defjvp
    def rule(primals, tangents):
        body = lambda c: (c[0] * 2 * c[1], c[1] * c[1] + 1.0)
        tangent = lax.while_loop(lambda c: c[1] < 30.0, body, (tangents[0], primals[0]))[0]
        return f(*primals), tangent

    @jax.custom_vjp
    def g(x):
        return grows(x)

    g.defvjp(lambda x: (g(x), x), lambda x, ct: (ct * grows(x),))
    assert_close(jax.grad(loopkit.checkpointed(f))(1.5), GROWN(1.5))
    assert_close(jax.grad(jax.jit(loopkit.checkpointed(f)))(1.5), GROWN(1.5))
    assert_close(jax.grad(jax.grad(loopkit.checkpointed(g)))(1.5), GROWN(1.5))


def test_a_function_is_traced_once():
    calls = []

    def f(x):
        calls.append(x)
        return jnp.sin(x)

    replaced = loopkit.checkpointed(f)
    replaced(1.0), replaced(2.0), jax.grad(replaced)(1.0)
    assert len(calls) == 1


def test_static_arguments_and_decorator():
    @loopkit.checkpointed(checkpoints=2)
    def power(x, n, *, name):
        assert isinstance(n, int)
        return {name: lax.fori_loop(0, n, lambda _, y: y * x, 1.0)}

    assert_close(jax.grad(lambda x: power(x, 3, name="cube")["cube"])(2.0), jnp.asarray(12.0))


def test_donated_arguments_and_keys():
    f = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, y: y * 2, x), donate_argnums=0)
    x = jnp.ones(8)
    assert_close(loopkit.checkpointed(f)(x), jnp.full(8, 8.0))
    assert x.is_deleted()
    key = jax.random.key(0)
    draw = loopkit.checkpointed(jax.random.poisson)
    assert_close(draw(key, jnp.arange(4.0)), jax.random.poisson(key, jnp.arange(4.0)))


def test_only_picks_loops():
    sites = []

    def f(x):
        with jax.named_scope("inner"):
            x = lax.fori_loop(0, 4, lambda i, y: y * x, x)
        return grows(x)

    def only(site):
        sites.append(site)
        return site.length is None

    text = str(jax.make_jaxpr(loopkit.checkpointed(f, only=only))(jnp.ones(())))
    assert text.count("loopkit_while") == 1
    scan, loop = sites
    assert (scan.kind, scan.length, scan.name_stack) == ("scan", 4, "inner")
    assert (loop.kind, loop.length, loop.carry_bytes) == ("while_loop", None, 8)
    assert "test_checkpointed.py" in loop.source
    assert "grows" in loop.source


def test_counted_while_loops_have_a_length():
    def f(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]

    text = str(jax.make_jaxpr(loopkit.checkpointed(f, checkpoints="all"))(2.0))
    assert "length=5" in text
    assert_close(jax.grad(loopkit.checkpointed(f, checkpoints="all"))(2.0), jnp.asarray(192.0))


def test_replacement_is_undone_also_on_error():
    compiled = jax.jit(grows)
    compiled(1.5)

    def fails():
        with loopkit.replace_lax_loops():
            assert_close(jax.grad(compiled)(1.5), GROWN(1.5))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(compiled)(1.5)


def test_other_threads_keep_their_loops():
    texts = {}

    def trace(name):
        texts[name] = str(jax.make_jaxpr(lambda x: grows(x))(1.5))

    with loopkit.replace_lax_loops():
        thread = threading.Thread(target=trace, args=("other",))
        thread.start()
        thread.join()
        trace("here")
        with loopkit.replace_lax_loops(only=lambda site: False):
            trace("nested")
    trace("after")
    assert {k: "loopkit" in text for k, text in texts.items()} == {
        "other": False,
        "here": True,
        "nested": False,
        "after": False,
    }


def test_loops_over_references_stay():
    def f(x):
        seen = jax.new_ref(jnp.zeros(3))

        def body(i, y):
            seen[i] = y
            return y * 2

        return lax.fori_loop(0, 3, body, x) + seen[...].sum()

    assert_close(loopkit.checkpointed(f)(1.0), jnp.asarray(15.0))


def test_the_line_search_of_optax():
    def f(a):
        def loss(x):
            return jnp.sum((x - a) ** 2) + jnp.sum(x**4)

        search = optax.scale_by_backtracking_linesearch(20)
        optimiser = optax.chain(optax.sgd(1.0), search)

        def step(state, _):
            x, rest = state
            value, grad = jax.value_and_grad(loss)(x)
            updates, rest = optimiser.update(grad, rest, x, value=value, grad=grad, value_fn=loss)
            return (optax.apply_updates(x, updates), rest), None

        x = jnp.zeros(2)
        return lax.scan(step, (x, optimiser.init(x)), length=5)[0][0].sum()

    a = jnp.array([1.0, 2.0])
    assert_close(jax.grad(loopkit.checkpointed(f))(a), jax.jacfwd(f)(a))


def test_transpose_of_a_linear_loop():
    xs = jnp.arange(1.0, 4.0)
    step = lambda c, x: (c * 2 + x, c + x)
    got = jax.linear_transpose(lambda x: loopkit.scan(step, x[0], x), xs)((1.0, xs))
    wanted = jax.linear_transpose(lambda x: lax.scan(step, x[0], x), xs)((1.0, xs))
    assert_close(got, wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -1}, "loopkit.checkpointed: `max_steps` must be"),
        ({"checkpoints": 0}, "loopkit.checkpointed: `checkpoints` must be"),
        ({"only": 3}, "loopkit.checkpointed: `only` must be a function"),
        ({"checkpoints": "all"}, 'can be "all" only if the number of steps of every loop is'),
    ],
)
def test_errors(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        loopkit.checkpointed(grows, **settings)(1.5)
