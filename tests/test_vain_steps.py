"""No error comes from a step that a lane does not take, and each error of a step that it does.

Lane i takes `COUNTS[i]` steps. A step checks that its argument is not negative, in one of many
ways, and the argument is negative in every step that is not taken.
"""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import checked_steps
import loopkit
from checked_steps import (
    CHECKS,
    COUNTS,
    MOST,
    OUTER,
    OUTSIDE,
    STARTS,
    finite,
    plain,
    thrown,
)
from derivatives import assert_close

SLOW, LATE = pytest.mark.slow, pytest.mark.exhaustive


def lanes_of(f):
    return lambda a: jax.vmap(f)(a, COUNTS)


MODES = {
    "value": lanes_of,
    "jvp": lambda f: lambda a: jax.jvp(lanes_of(f), (a,), (jnp.cos(a),))[1],
    "vmap-jvp": lambda f: lanes_of(lambda a, n: jax.jvp(lambda a: f(a, n), (a,), (a,))[1]),
    "grad": lambda f: jax.grad(lambda a: jnp.sum(lanes_of(f)(a))),
    "vmap-grad": lambda f: lanes_of(jax.grad(f)),
    "grad-grad": lambda f: jax.grad(lambda a: jnp.sum(lanes_of(jax.grad(f))(a))),
    "vmap-grad-grad": lambda f: lanes_of(jax.grad(jax.grad(f))),
    "grad-jvp": lambda f: jax.grad(lambda a: jnp.sum(MODES["jvp"](f)(a))),
}
WITH_JVP = ("jvp", "vmap-jvp", "grad-jvp")


def in_python(a, n):
    """The loop of one lane, in Python."""
    x = a
    for t in range(MOST):
        x = jnp.where(t < n, plain(x, a + float(t)), x)
    return x


@ft.cache
def wanted(mode):
    return jax.jit(MODES[mode](in_python))(STARTS)


def derived(check, outer, mode, jit):
    f = MODES[mode](ft.partial(OUTER[outer], CHECKS[check]))
    return jax.jit(f) if jit and outer not in OUTSIDE else f


def assert_no_error(check, outer, mode, jit):
    assert_close(derived(check, outer, mode, jit)(STARTS), wanted(mode))


def cases():
    """Each check in each loop, with modes in turn."""
    for i, check in enumerate(CHECKS):
        modes = [m for m in MODES if check != "in_custom_vjp" or m not in WITH_JVP]
        for j, outer in enumerate(OUTER):
            mode = modes[(i + j) % len(modes)]
            case = check, outer, mode, (i + j // len(modes)) % 2 == 0
            late = (i + j) % len(OUTER)
            often = late == 0 and i % 3 == 0
            quick = often and check != "in_custom_vjp"  # it takes long to compile
            marks = () if quick else SLOW if often or late == 7 else LATE
            yield pytest.param(*case, marks=marks, id="-".join(case[:3]))


@pytest.mark.parametrize(("check", "outer", "mode", "jit"), list(cases()))
def test_no_error(check, outer, mode, jit):
    assert_no_error(check, outer, mode, jit)


TEXTS = {
    **dict.fromkeys(CHECKS, "argument is negative"),
    **dict.fromkeys(("thrown", "in_checkpoint", "in_lanes"), "max_steps"),
    **dict.fromkeys(("in_custom_jvp", "in_custom_vjp"), "max_steps"),
    **dict.fromkeys(("finite", "finite_while"), "must stay finite"),
    "rows": "within its shape",
    "appended": "within the capacity",
}


@pytest.fixture
def last_is_bad(monkeypatch):
    """In the third step, which only the first lane takes, the argument is negative as well."""
    before = checked_steps.argument
    worse = lambda a, t, n: jnp.where(t == 2, -1.0, before(a, t, n))
    monkeypatch.setattr(checked_steps, "argument", worse)


@pytest.mark.usefixtures("last_is_bad")
@pytest.mark.parametrize(("check", "outer", "mode", "jit"), list(cases()))
def test_error_of_a_step_that_is_taken(check, outer, mode, jit):
    if check == "in_branch_not_taken":
        pytest.skip("its branch is not taken there either")
    with pytest.raises(Exception, match=TEXTS[check]):
        jax.block_until_ready(derived(check, outer, mode, jit)(STARTS))


UNROLLED = [name for name in OUTER if name.endswith("unrolled")]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["thrown", "finite", "error_if"])
@pytest.mark.parametrize("outer", UNROLLED)
def test_one_lane_of_unrolled_steps(outer, check):
    """Steps beyond the last are in the same iteration."""
    f = ft.partial(OUTER[outer], CHECKS[check])
    for a, n in zip(STARTS, COUNTS, strict=True):
        assert_close(jax.jit(jax.grad(f))(a, n), jax.grad(in_python)(a, n))


COUNTS_OF_LAST = jnp.array([1, 0, 3, 2])
"""Lane 2 takes most steps."""


@pytest.mark.slow
def test_which_step_and_lane_is_not_finite():
    """Stopped lanes have arguments as bad, and are not named."""
    argument_of = lambda t, n: jnp.where(t < jnp.minimum(n, 2), 1.0, -1.0)
    outer = {"inner": None, "outer": "finite"}
    inner = {"inner": finite, "outer": plain}
    step_of = {"inner": 0, "outer": 2}
    for which, debug in outer.items():
        step = lambda t, x, n, which=which: inner[which](x, argument_of(t, n))
        f = lambda a, n, debug=debug, step=step: loopkit.fori_loop(
            0, n, lambda t, x: step(t, x, n), a, max_steps=MOST, debug=debug
        )
        text = f"nan in step {step_of[which]} in lane 2, going forward"
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(jax.vmap(f)(STARTS, COUNTS_OF_LAST))


def checked(x, a):
    checkify.check(a >= 0, "the argument is negative")
    return plain(x, jnp.abs(a))


@pytest.mark.parametrize("outer", ["while-bounded", "fori", "until", "nested", "while-flatten"])
def test_checkify_around_lanes(outer):
    f = lanes_of(ft.partial(OUTER[outer], checked))
    error, found = jax.jit(checkify.checkify(f))(STARTS)
    assert error.get() is None
    assert_close(found, wanted("value"))


@pytest.mark.usefixtures("last_is_bad")
def test_checkify_hears_a_step_that_is_taken():
    f = lanes_of(ft.partial(OUTER["fori"], checked))
    error, _ = jax.jit(checkify.checkify(f))(STARTS)
    assert "the argument is negative" in str(error.get())


@pytest.mark.slow
def test_ragged():
    """Rows after a stop, and those of padding, are as bad."""
    lengths = [2, 1, 1]
    columns = [2.0, 3.0, -1.0, -1.0], [1.5, -1.0], [4.0]
    sequences = [jnp.array(c) for c in columns]

    def run(sequences):
        pairs = zip(sequences, lengths, strict=True)
        rows = [(xs, jnp.full(len(xs), n)) for xs, n in pairs]
        step = lambda c, x: ((c[0] + 1, thrown(c[1], x[0] - 1.0)), x[1])
        stop = lambda c, n: c[0] >= n
        flat = [jnp.stack([xs, n.astype(xs.dtype)], 1) for xs, n in rows]
        return loopkit.ragged_scan(step, (0.0, 1.0), flat, until=stop)[0][1]

    def unrolled(sequences):
        ends = []
        for xs, n in zip(sequences, lengths, strict=True):
            end = jnp.ones(())
            for x in xs[:n]:
                end = plain(end, x - 1.0)
            ends.append(end)
        return jnp.stack(ends)

    assert_close(run(sequences), unrolled(sequences))
    total = lambda f: lambda sequences: jnp.sum(f(sequences))
    assert_close(jax.grad(total(run))(sequences), jax.grad(total(unrolled))(sequences))
