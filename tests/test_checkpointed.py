"""The loops of lax inside functions that you cannot edit."""

import re
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close, derivative, expected
from problems import CHECKPOINTS, Problem, named, tagged
from reference_loops import LaxLoops
from turns import in_turn

PLAIN = named("while_scalar", "while_vector", "scan_xs_ys", "scan_reverse", "while_in_while")
PLAIN += named("fori_traced_bound", "carry_of_mixed_types", "params_in_the_carry")


def with_lax(problem: Problem):
    return problem.flat(problem.through(LaxLoops()))


@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(PLAIN, CHECKPOINTS))
def test_checkpointed_differentiates_in_reverse(problem: Problem, checkpoints):
    settings = {"checkpoints": checkpoints, "max_steps": problem.bound}
    f = loopkit.checkpointed(with_lax(problem), **settings)
    x = problem.vector()
    assert_close(f(x), expected(problem.name, ""))
    assert_close(jax.jit(derivative(f, "r"))(x), expected(problem.name, "r"))


@pytest.mark.parametrize("pattern", ["f", "fr", "rf", "rr"])
@pytest.mark.parametrize("problem", tagged("small")[:1], ids=lambda problem: problem.name)
def test_checkpointed_in_other_modes(problem: Problem, pattern):
    x, f = problem.vector(), loopkit.checkpointed(with_lax(problem))
    assert_close(derivative(f, pattern)(x), expected(problem.name, pattern))


def grows(x):
    return lax.while_loop(lambda x: x < 30.0, lambda x: x * x + 1.0, x)


GROWN = jax.grad(lambda x: ((x * x + 1.0) ** 2 + 1.0) ** 2 + 1.0)


@pytest.mark.exhaustive
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


@pytest.mark.slow
@pytest.mark.parametrize("around", ["checkpointed", "replace_lax_loops"])
def test_loops_inside_shard_map(around):
    """Each device takes steps of its own number."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("d",))
    local = lambda x: jnp.atleast_1d(grows(x[0]))
    on_devices = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    loss = lambda x: jnp.sum(on_devices(x))
    x = jnp.array([1.5, 3.0, 0.1, 40.0])
    wanted = jax.jacfwd(lambda x: jnp.stack([*map(grows, x)]).sum())(x)
    if around == "checkpointed":
        assert_close(jax.jit(jax.grad(loopkit.checkpointed(loss)))(x), wanted)
    else:
        with loopkit.replace_lax_loops():
            assert_close(jax.jit(jax.grad(loss))(x), wanted)


def test_steps_report_once():
    seen = []

    def f(x):
        def body(i, y):
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return y * x

        return lax.fori_loop(0, 4, body, x)

    jax.grad(loopkit.checkpointed(f, checkpoints=2))(1.5)
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]


class Oscillator(eqx.Module):
    stiffness: jax.Array
    name: str
    force: Callable = eqx.field(static=True)


def test_pytrees_go_in_and_out():
    @loopkit.checkpointed
    def settle(model, state):
        def step(state):
            pull = model.force(model.stiffness * state["x"])
            return state | {"x": state["x"] - 0.1 * pull, "steps": state["steps"] + 1}

        end = lax.while_loop(lambda s: jnp.abs(s["x"]) > 0.5, step, state)
        return {"model": model, "end": end}

    model = Oscillator(jnp.asarray(1.3), "spring", jnp.sin)
    out = settle(model, {"x": jnp.asarray(1.0), "steps": 0})
    assert out["model"].name == "spring"
    assert out["end"]["steps"].dtype == int

    def end(k, settle):
        model = Oscillator(k, "spring", jnp.sin)
        return settle(model, {"x": jnp.asarray(1.0), "steps": 0})["end"]["x"]

    k = jnp.asarray(1.3)
    assert_close(jax.grad(end)(k, settle), jax.jacfwd(end)(k, settle.__wrapped__))


@pytest.mark.slow
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


def test_static_arguments_and_decorator():
    @loopkit.checkpointed(checkpoints=2)
    def power(x, n, *, name):
        assert isinstance(n, int)
        return {name: lax.fori_loop(0, n, lambda _, y: y * x, 1.0)}

    assert_close(jax.grad(lambda x: power(x, 3, name="cube")["cube"])(2.0), jnp.asarray(12.0))


def test_an_array_of_words_stays_as_it_is():
    def chosen(x, words):
        rate = {"fast": 2.0, "slow": 0.5}[words[0]]
        return lax.scan(lambda c, _: (rate * jnp.sin(c), None), x, length=3)[0]

    words = np.array(["slow", "fast"])
    found = jax.grad(loopkit.checkpointed(chosen))(1.0, words)
    assert_close(found, jax.grad(lambda x: chosen(x, words))(1.0))


def test_numbers_of_a_model_stay_as_they_are():
    """Equinox knows settings by their types: a rate of dropout is no input of a scan."""

    def deep(model, x, rate):
        assert isinstance(rate, jax.Array)
        assert (type(model["rate"]), type(model["heads"])) == (float, int)
        weights, rest = eqx.partition(model, eqx.is_array)
        step = lambda x, w: (jnp.sin(eqx.combine(w, rest)["w"] * x) * rest["rate"], None)
        return lax.scan(step, x, weights)[0] * rate

    model = {"w": jnp.linspace(0.5, 1.5, 7), "rate": 0.9, "heads": 2, "act": jnp.tanh}
    slope = lambda f: eqx.filter_grad(lambda model: f(model, 0.3, jnp.asarray(2.0)))(model)["w"]
    assert_close(slope(loopkit.checkpointed(deep)), slope(deep))
    assert len(loopkit.explain(loopkit.checkpointed(deep), model, 0.3, 2.0)) == 1


class Growth:
    """No pytree: JAX does not see what it holds."""

    def __init__(self, rate):
        self.rate = rate

    @loopkit.checkpointed
    def until_large(self, x):
        return lax.while_loop(lambda y: y < 100.0, lambda y: y * self.rate, x)


@pytest.mark.slow
def test_objects_that_change_are_read_again():
    growth = Growth(2.0)
    assert growth.until_large(1.5) == 192.0

    def large(rate):
        growth.rate = rate
        return growth.until_large(1.5)

    assert_close(jax.grad(large)(3.0), jnp.asarray(162.0))
    grow = loopkit.checkpointed(lambda x, by: lax.fori_loop(0, 2, lambda _, y: by(y), x))
    by = partial(lambda growth, y: y * growth.rate, growth)
    growth.rate = 5.0
    assert grow(1.0, by) == 25.0
    growth.rate = 7.0
    assert grow(1.0, by) == 49.0


def test_results_that_are_no_arrays_of_jax_are_not_shared():
    counted = loopkit.checkpointed(lambda x: (lax.fori_loop(0, 3, jnp.add, x), np.zeros(2)))
    counted(1.0)[1][:] = 1.0
    np.testing.assert_array_equal(counted(1.0)[1], np.zeros(2))


@pytest.mark.exhaustive
def test_donated_arguments_and_keys():
    f = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, y: y * 2, x), donate_argnums=0)
    x = jnp.ones(8)
    assert_close(loopkit.checkpointed(f)(x), jnp.full(8, 8.0))
    assert x.is_deleted()
    key = jax.random.key(0)
    draw = loopkit.checkpointed(jax.random.poisson)
    assert_close(draw(key, jnp.arange(4.0)), jax.random.poisson(key, jnp.arange(4.0)))


def long_loops(x):
    """A loop that is run twice, and one with a loop inside."""
    inner = jax.jit(lambda x: lax.scan(lambda c, _: (jnp.sin(c) * c, None), x, length=256)[0])
    outer = lambda c, _: (inner(c), jnp.sum(c))
    x, sums = lax.scan(outer, inner(inner(x)), length=8)
    return jnp.sum(x) + jnp.sum(sums)


def temporary_bytes(f, x):
    compiled = jax.jit(jax.grad(f)).lower(x).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled(x)


@pytest.mark.slow
def test_loops_share_a_budget_in_bytes():
    x, budget = jnp.linspace(1.0, 1.2, 1000), 1 << 20
    stored, wanted = temporary_bytes(long_loops, x)
    within = loopkit.checkpointed(long_loops, memory="1 MiB", measure=True)
    used, gradient = temporary_bytes(within, x)
    assert_close(gradient, wanted)
    assert budget / 3 < used <= budget < stored
    text = str(jax.make_jaxpr(loopkit.checkpointed(long_loops, memory=budget))(x))
    parts = list(map(int, re.findall(r"Part\(count=(\d+),", text)))
    assert len(set(parts)) > 1
    assert max(parts) < budget
    with loopkit.replace_lax_loops(memory=budget):
        alone, gradient = temporary_bytes(long_loops, x)
    assert_close(gradient, wanted)
    assert alone < stored


def test_a_budget_of_its_own_is_kept():
    def f(x):
        x = loopkit.scan(lambda c, _: (c * x, None), x, length=9, memory=10_000)[0]
        return lax.scan(lambda c, _: (c * x, None), x, length=9)[0]

    text = str(jax.make_jaxpr(loopkit.checkpointed(f, memory=10_000))(1.0))
    assert text.count("Bytes(count=10000, loops=1, host=None") == 1
    assert text.count("Part(count=") == 1


def test_a_budget_too_small_says_what_would_do():
    match = r"must be at least \d+ bytes. Most of it, \d+ bytes, is for going back"
    with pytest.raises(ValueError, match=match):
        jax.grad(loopkit.checkpointed(long_loops, memory=100))(jnp.ones(1000))


def test_loops_over_references_stay():
    def f(x):
        seen = jax.new_ref(jnp.zeros(3))

        def body(i, y):
            seen[i] = y
            return y * 2

        return lax.fori_loop(0, 3, body, x) + seen[...].sum()

    assert_close(loopkit.checkpointed(f)(1.0), jnp.asarray(15.0))


@pytest.mark.slow
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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -1}, "loopkit.checkpointed: `max_steps` must be"),
        ({"checkpoints": 0}, "loopkit.checkpointed: `checkpoints` must be"),
        ({"only": 3}, "loopkit.checkpointed: `only` must be a function"),
        ({"memory": "much"}, "loopkit.checkpointed: `memory` must be"),
        ({"memory": 9, "checkpoints": 9}, "loopkit.checkpointed: `memory` cannot be given"),
        ({"checkpoints": "all"}, 'can be "all" or a policy only if the number of steps is'),
    ],
)
def test_errors(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jax.grad(loopkit.checkpointed(grows, **settings))(1.5)


def test_leaves_that_stay_come_back_as_arrays():
    def f(x):
        step = lambda s: (s[0] + 1.5, *s[1:])
        _, limit, scale = jax.lax.while_loop(lambda s: s[0] < s[1], step, (x, 4, np.float32(2)))
        return x * limit.astype("float64") * scale.astype("float64")

    np.testing.assert_allclose(jax.grad(loopkit.checkpointed(f))(0.5), 8.0)
