"""Effects of a body: each step reports once, however often it is recomputed."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import effects
from jax.experimental import io_callback
from jax.extend.core import Primitive

import loopkit
from loopkit import Plan
from problems import CHECKPOINTS
from tolerances import assert_near


def reporting(record, n, x, checkpoints):
    def body(carry):
        step, x = carry
        jax.debug.callback(record, step, x)
        return step + 1, jnp.sin(x)

    return loopkit.while_loop(
        lambda c: c[0] < n, body, (0, x), checkpoints=checkpoints, max_steps=8
    )[1]


TRANSFORMS = {
    "value": lambda f: f,
    "jit": jax.jit,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,)),
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "hessian": jax.hessian,
    "remat": lambda f: lambda x: jax.jit(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_step_reports_once(transform, checkpoints):
    """Steps that are recomputed for a gradient are silent."""
    seen = []
    f = lambda x: reporting(lambda step, _: seen.append(int(step)), 5, x, checkpoints)
    jax.block_until_ready(TRANSFORMS[transform](f)(0.3))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("transform", ["jit of grad", "hessian", "linearize"])
@pytest.mark.parametrize("around", ["part", "inner loop"])
def test_a_part_of_a_step_that_is_run_again_reports_once(around, transform):
    """A reversed step does not report again what jax.checkpoint runs again."""
    seen = []

    def part(y, row):
        jax.debug.callback(lambda row, y: seen.append(int(row)), row, y)
        return jnp.sin(y) * y

    def looped(y, row):
        return loopkit.fori_loop(0, 2, lambda i, y: part(y, 10 * row + i), y, checkpoints=1)

    run = jax.checkpoint(part if around == "part" else looped)
    f = lambda x: loopkit.scan(lambda y, row: (run(y, row), None), x, jnp.arange(4), checkpoints=2)[
        0
    ]
    linearize = lambda f: lambda x: jax.linearize(f, x)[1](1.0)
    jax.block_until_ready((TRANSFORMS | {"linearize": linearize})[transform](f)(0.3))
    jax.effects_barrier()
    rows = [10 * row + i for row in range(4) for i in range(2)]
    assert sorted(seen) == (list(range(4)) if around == "part" else rows)


def test_scan_steps_report_once():
    seen = []

    def f(x):
        def body(x, row):
            jax.debug.callback(lambda row: seen.append(int(row)), row)
            return jnp.sin(x), None

        return loopkit.scan(body, x, jnp.arange(6), checkpoints=2)[0]

    jax.block_until_ready(jax.grad(f)(0.3))
    jax.effects_barrier()
    assert sorted(seen) == list(range(6))


@pytest.mark.slow
def test_lanes_report_each_of_their_steps():
    seen = []
    f = lambda x: reporting(lambda step, x: seen.append((int(step), float(x))), 3, x, 1)
    jax.block_until_ready(jax.vmap(jax.grad(f))(jnp.asarray([0.0, 100.0])))
    jax.effects_barrier()
    assert sorted(step for step, _ in seen) == [0, 0, 1, 1, 2, 2]


def test_lanes_that_stop_early_report_each_of_their_steps():
    seen = set()
    f = lambda n, x: reporting(lambda step, x: seen.add((int(step), float(x))), n, x, 1)
    jax.block_until_ready(jax.vmap(f)(jnp.asarray([1, 3]), jnp.asarray([0.5, 0.25])))
    jax.effects_barrier()
    first, second = jnp.sin(0.25), jnp.sin(jnp.sin(0.25))
    assert seen >= {(0, 0.5), (0, 0.25), (1, float(first)), (2, float(second))}


def test_debug_print(capfd):
    def f(x):
        def body(carry):
            step, x = carry
            jax.debug.print("step {} at {x:.1f}", step, x=x)
            return step + 1, 2 * x

        return loopkit.while_loop(lambda c: c[0] < 2, body, (0, x), checkpoints=1)[1]

    jax.block_until_ready(jax.grad(f)(1.0))
    jax.effects_barrier()
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["step 0 at 1.0", "step 1 at 2.0"]


def test_what_is_computed_once_prints_nothing(capfd):
    """A value of the constants alone that the derivative reads, beside a step that prints."""

    def f(w, x):
        def body(x, _):
            jax.debug.print("at {x:.1f}", x=x)
            return jnp.sin(w) * x, None

        return loopkit.scan(body, x, None, length=2, checkpoints=2)[0]

    jax.block_until_ready(jax.grad(f, (0, 1))(np.arcsin(0.5), 1.0))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == ["at 0.5", "at 1.0"]


@pytest.mark.parametrize("transform", [t for t in TRANSFORMS if t != "jvp"])
def test_reports_under_cond(transform):
    """A branch that reports nothing does not stand for one that returns values of the host."""
    seen = []
    tell = lambda step: (io_callback(lambda n: seen.append(int(n)), None, step), 0)[1]

    def body(step, x):
        return jnp.sin(x) + lax.cond(step % 2 == 0, lambda: tell(step), lambda: 0)

    f = lambda x, body=body: loopkit.fori_loop(0, 5, body, x, checkpoints=1)
    silent = lambda x: f(x, lambda _, x: jnp.sin(x))
    assert_near(TRANSFORMS[transform](f)(0.3), TRANSFORMS[transform](silent)(0.3))
    jax.effects_barrier()
    assert sorted(seen) == [0, 2, 4]


def test_callbacks_with_results():
    """io_callback runs for each step, in the order of the steps if that is asked for."""
    seen = []

    def record(step):
        seen.append(int(step))
        return np.float64(2.0)

    def body(carry):
        step, x = carry
        factor = io_callback(record, jax.ShapeDtypeStruct((), "float64"), step, ordered=False)
        return step + 1, x * factor

    out = loopkit.while_loop(lambda c: c[0] < 3, body, (0, 1.0))
    jax.effects_barrier()
    assert out[1] == 8.0
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("max_steps", [None, 8])
def test_the_predicate_is_read_once_a_step(max_steps, unroll):
    """The predicate is read once a step, and once more to see that it no longer holds."""
    seen = []

    def goes_on(carry):
        jax.debug.callback(lambda step: seen.append(int(step)), carry[0])
        return carry[0] < 4

    body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
    out = loopkit.while_loop(goes_on, body, (0, 0.3), max_steps=max_steps, unroll=unroll)
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, Plan(8), "all"], ids=str)
def test_unrolled_steps_that_are_not_taken_report_nothing(checkpoints):
    """The last iteration of two steps runs one step too many, which reports nothing."""
    seen = []

    def body(carry):
        jax.debug.callback(lambda step: seen.append(int(step)), carry[0])
        return carry[0] + 1, jnp.sin(carry[1])

    how = {"max_steps": 8, "unroll": 2, "checkpoints": checkpoints}
    f = lambda x: loopkit.while_loop(lambda c: c[1] > 0.5, body, (0, x), **how)[1]
    jax.block_until_ready(jax.grad(f)(0.57))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2]


def random_product(scan, draws):
    """The product of numbers that the host draws anew at every step, times x**9."""
    number = jax.ShapeDtypeStruct((), jnp.result_type(float))

    def body(y, x):
        return y * x * io_callback(lambda: np.asarray(draws.random(), number.dtype), number), None

    return lambda x: scan(body, jnp.ones(()), jnp.full(9, x))[0]


SCANS = {
    "scan": loopkit.scan,
    "all": lambda *args: loopkit.scan(*args, checkpoints="all"),
    "checkpointed": lambda *args: loopkit.checkpointed(lax.scan, checkpoints=2)(*args),
    "until": lambda *args: loopkit.scan(*args, until=lambda y, _: jnp.isnan(y)),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_a_gradient_is_that_of_what_the_host_returned(scan, around):
    f = around(jax.value_and_grad(random_product(scan, np.random.default_rng(0))))
    value, slope = f(1.7)
    assert_near(slope * 1.7 / 9, value)


@pytest.mark.parametrize("derivative", [jax.hessian, lambda f: lambda x: jax.linearize(f, x)[1](x)])
def test_steps_that_ask_the_host_are_not_run_again(derivative):
    f = random_product(loopkit.scan, np.random.default_rng(0))
    with pytest.raises(
        NotImplementedError, match=r"must return the same values again[.] .*Got: a jax"
    ):
        derivative(f)(1.7)


def test_a_gradient_without_a_bound_cannot_ask_the_host():
    number = jax.ShapeDtypeStruct((), "float64")

    def f(x, **settings):
        body = lambda y: y * x * io_callback(lambda: np.float64(2.0), number)
        return loopkit.while_loop(lambda y: y < 20.0, body, 1.0, **settings)

    with pytest.raises(NotImplementedError, match=r'pass `checkpoints="all"` and bound the steps'):
        jax.grad(f)(1.5)
    assert jax.grad(lambda x: f(x, max_steps=5))(1.5) == 3 * 2**3 * 1.5**2


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("how", [{"checkpoints": "all"}, {"truncate": 2}], ids=str)
def test_what_returns_nothing_is_called_where_every_step_is_stored(how, ordered):
    """A scan of lax, differentiated, leaves it out."""
    seen = []

    def body(x, step):
        io_callback(lambda step: seen.append(int(step)), None, step, ordered=ordered)
        return jnp.sin(x), x

    f = lambda x: loopkit.scan(body, x, jnp.arange(5), **how)[0]
    for transform in (jax.grad, jax.hessian, lambda f: lambda x: jax.linearize(f, x)[1](x)):
        jax.block_until_ready(transform(f)(0.3))
        jax.effects_barrier()
        assert sorted(seen) == [0, 1, 2, 3, 4]
        seen.clear()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_what_returns_nothing_is_called_once(checkpoints, ordered):
    seen = []

    def body(carry):
        step, x = carry
        io_callback(lambda step: seen.append(int(step)), None, step, ordered=ordered)
        return step + 1, jnp.sin(x)

    def f(x):
        settings = {"checkpoints": checkpoints, "max_steps": 8}
        return loopkit.while_loop(lambda c: c[0] < 5, body, (0, x), **settings)[1]

    jax.block_until_ready(jax.jit(jax.grad(f))(0.3))
    jax.effects_barrier()
    assert (seen if ordered else sorted(seen)) == [0, 1, 2, 3, 4]


def test_an_effect_that_no_loop_can_have():
    class Odd(effects.Effect):
        __str__ = lambda _: "odd"

    odd_p = Primitive("odd")
    odd_p.def_effectful_abstract_eval(lambda x: (x, {Odd()}))
    message = (
        r"loopkit\.scan: `f` may have only side effects that compiled loops can have\. "
        r"Use jax\.debug\.print, jax\.debug\.callback or .*io_callback\. Got: odd\."
    )
    with pytest.raises(NotImplementedError, match=message):
        loopkit.scan(lambda c, _: (odd_p.bind(c), None), 1.0, length=2)
