"""Errors about loops of other libraries that have no derivative: where they are, and what to do.

Each program raises an error that names the line of the loop, in the code of whoever wrote
it, what in it is the matter, and the way out; of the same type as the error of the loop unrolled.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close


def scanned(step, x):
    return lax.scan(lambda c, _: (step(c), None), x, length=3)[0]


def until(step, x):
    more = lambda s: (step(s[0]), s[1] + 1.0 + 0 * jnp.abs(s[0]).astype(float))
    return lax.while_loop(lambda s: s[1] < 3.0, more, (x, 0.0 * x))[0]


LOOPS = {"scan": scanned, "while_loop": until}


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_vjp
def raising(x):
    return x * 1.0


def raises(_, ct):
    raise RuntimeError("the author of this rule says no")


raising.defvjp(lambda x: (x * 1.0, None), raises)


@jax.custom_vjp
def wrong(x):
    return x * 1.0


wrong.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (ct.reshape(3),))
TYPE = jax.ShapeDtypeStruct((), "float64")


def solved(x, **how):
    of = lambda matvec, b: lax.while_loop(lambda z: z < b, lambda z: z + 1.0, 0.0 * b)
    return lax.custom_linear_solve(lambda v: v * x, x, of, **how)


def schur(x):
    return lax.linalg.schur(jnp.eye(2) * x)[0].sum()


def eigenvectors(x):
    return jnp.linalg.eig(jnp.array([[1.0, 2.0], [3.0, 4.0]]) * x)[1].real.sum()


GRAD, FORWARD = jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]
SECOND = lambda f: jax.grad(jax.grad(f))
NO_RULE = r"Differentiation rule for '{}' not implemented"


class Refused(NamedTuple):
    step: Callable
    error: type[Exception]
    says: str
    """The reason that the error gives."""
    how: Callable = GRAD
    advice: str = r"jax\.custom_jvp.*jax\.lax\.stop_gradient.*`only`"
    kinds: tuple[str, ...] = ("scan", "while_loop")


REFUSED = {
    "schur": Refused(schur, NotImplementedError, NO_RULE.format("schur")),
    "schur, forward": Refused(schur, NotImplementedError, NO_RULE.format("schur"), FORWARD),
    "in a cond": Refused(
        lambda x: lax.cond(x > 9, jnp.sin, schur, x), NotImplementedError, NO_RULE.format("schur")
    ),
    "in jit": Refused(jax.jit(schur), NotImplementedError, NO_RULE.format("schur")),
    "hessenberg": Refused(
        lambda x: lax.linalg.hessenberg(jnp.eye(2) * x)[0].sum(),
        *(NotImplementedError, NO_RULE.format("hessenberg")),
    ),
    "eigenvectors": Refused(eigenvectors, NotImplementedError, "non-symmetric eigenvectors"),
    "second derivative without a rule": Refused(
        lambda x: jax.scipy.special.gammainc(x, x),
        *(NotImplementedError, NO_RULE.format("igamma_grad_a"), SECOND),
    ),
    "a reduction by a function": Refused(
        lambda x: lax.reduce_window(
            jnp.stack([x, x]), 0.0, lambda a, b: a + b * b, (2,), (1,), "VALID"
        ).sum(),
        *(ValueError, "Linearization failed"),
    ),
    "a rule that raises in JAX": Refused(
        lambda x: jax.scipy.special.betainc(x, 2.0, 0.5), ValueError, "Betainc gradient"
    ),
    "pure_callback": Refused(
        lambda x: jax.pure_callback(np.asarray, TYPE, x), ValueError, "Pure callbacks do not"
    ),
    "io_callback": Refused(
        lambda x: (io_callback(lambda v: None, None, x), x * 2)[1], ValueError, "IO callbacks do"
    ),
    "ffi": Refused(
        lambda x: jax.ffi.ffi_call("nobody", TYPE)(x), ValueError, "FFI call to `nobody` cannot be"
    ),
    "custom_linear_solve without a transpose": Refused(
        solved, TypeError, "transpose_solve required"
    ),
    "custom_vjp, forward": Refused(
        with_vjp, TypeError, r"\(jvp\) to a custom_vjp function", jax.jacfwd
    ),
    "custom_vjp, second derivative": Refused(
        with_vjp,
        *(NotImplementedError, "custom VJP in a second derivative only if", SECOND),
        *(r"max_steps.*custom JVP.*", ("while_loop",)),
    ),
}


def line_of(f, text="lax."):
    """Return the line where a function of this file calls it."""
    lines, first = inspect.getsourcelines(f)
    at = next(first + i for i, line in enumerate(lines) if text in line)
    return rf"\S+test_foreign_errors\.py:{at} \({f.__name__}\)"


def error_of(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def causes(error):
    while (error := error.__cause__) is not None:
        yield error


CASES = [(name, kind) for name, case in REFUSED.items() for kind in case.kinds]


@pytest.mark.parametrize("jitted", [False, True], ids=["", "jit"])
@pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_cannot_be_differentiated(name, kind, by, jitted):
    case, loop = REFUSED[name], LOOPS[kind]

    def call():
        f = lambda x: loop(case.step, x)
        f = loopkit.checkpointed(f) if by == "checkpointed" else f
        derivative = case.how(f)
        return (jax.jit(derivative) if jitted else derivative)(0.7)

    if by == "checkpointed":
        error = error_of(call)
    else:
        with loopkit.replace_lax_loops():
            error = error_of(call)
    assert type(error) is case.error
    place = rf"in the {kind} at {line_of(loop)}(, which `only` can leave out)?"
    pattern = rf"^loopkit\.{by}: {place}: (?=.*{case.says}).*\. .*{case.advice}\. Got: .*\.$"
    assert re.search(pattern, str(error)), str(error)
    assert any(type(e) is case.error and re.search(case.says, str(e)) for e in causes(error))


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize(("step", "type_"), [(raising, RuntimeError), (wrong, TypeError)])
def test_errors_of_others_stay_what_they_are(kind, step, type_):
    """An error from another library's rule stays the same, and gets a note about the loop."""
    error = error_of(lambda: jax.grad(loopkit.checkpointed(lambda x: LOOPS[kind](step, x)))(0.7))
    assert type(error) is type_
    assert "loopkit" not in str(error)
    place = f"loopkit.checkpointed: this is in the {kind} at {line_of(LOOPS[kind])}."
    notes = [note for note in error.__notes__ if "loopkit" in note]
    assert re.fullmatch(place, "".join(notes))


@pytest.mark.parametrize("kind", [AssertionError, KeyError, jax.errors.JaxRuntimeError])
def test_nobody_sees_what_is_wrong_inside(kind, monkeypatch):
    """Types of JAX stay as they are; errors of the library itself do not."""

    def fails(*_):
        raise kind("inside")

    monkeypatch.setattr(fails, "__code__", fails.__code__.replace(co_filename=loopkit.__file__))
    monkeypatch.setattr("loopkit._engine.derivative.reversal.best_plan", fails)
    f = lambda x: scanned(jnp.sin, x * jnp.ones(2)).sum()
    error = error_of(lambda: jax.grad(loopkit.checkpointed(f))(0.7))
    place = f"in the scan at {line_of(scanned)}"
    if kind is not jax.errors.JaxRuntimeError:
        assert type(error) is NotImplementedError
        assert re.match(rf"loopkit\.checkpointed: {place}: .*`only`.* Got: '?inside", str(error))
    else:
        assert type(error) is kind
        assert any(re.search(place, note) for note in error.__notes__)


def test_the_innermost_loop_is_named():
    f = lambda x: scanned(lambda x: until(lambda x: schur(x), x), x)
    text = str(error_of(lambda: jax.grad(loopkit.checkpointed(f))(0.7)))
    assert re.search(rf"in the while_loop at {line_of(until)}: the steps must have a der", text)
    assert text.count("loopkit.checkpointed") == 1


def test_loops_of_ones_own_say_what_jax_says():
    f = lambda x: loopkit.scan(lambda c, _: (schur(c), None), x, length=3)[0]
    with pytest.raises(NotImplementedError, match=r"^Differentiation rule for 'schur'"):
        jax.grad(f)(0.7)


def test_a_budget_too_small_names_the_loop():
    f = lambda x: scanned(lambda x: jnp.sin(x) * x, x).sum()
    error = error_of(lambda: jax.grad(loopkit.checkpointed(f, memory="100 B"))(jnp.ones(1000)))
    assert type(error) is ValueError
    place = r"going back through scan at test_foreign_errors\.py:\d+"
    text = rf"loopkit\.checkpointed: `memory` must be at least .* for {place}\. .* Got: 100 bytes\."
    assert re.fullmatch(text, str(error))


def test_host_memory_that_is_missing_names_the_loop(monkeypatch):
    kinds = "loopkit._engine.lowering.memory.memory_kinds"
    monkeypatch.setattr(kinds, lambda device: {"unpinned_host"})
    monkeypatch.setattr("loopkit._engine.lowering.memory._sound", set())
    memory: Any = {"device": "20 kB", "host": "1 GB"}
    how = loopkit.checkpointed(lambda x: lax.scan(big, x, length=200)[0].sum(), memory=memory)
    big = lambda x, _: (jnp.sin(x) * x, None)
    error = error_of(lambda: jax.grad(how)(jnp.ones(300)))
    assert type(error) is NotImplementedError
    assert re.match(r"loopkit\.checkpointed: in the scan at \S+test_foreign_errors.*", str(error))
    assert re.search("`only` can.* host only if the device .*host=False", str(error))


@pytest.mark.slow
def test_all_without_a_bound_names_the_loop():
    f = lambda x: until(jnp.sin, x)
    error = error_of(lambda: jax.grad(loopkit.checkpointed(f, checkpoints="all"))(0.7))
    assert type(error) is ValueError
    match = (
        rf"the while_loop at {line_of(until)}, which `only` can leave out: `checkpoints` can be "
    )
    assert re.search(match + r'"all" or a policy only .*[.] Pass `max_steps`', str(error))
    settings: Any = {"checkpoints": "all", "max_steps": 4}
    assert_close(jax.grad(loopkit.checkpointed(f, **settings))(0.7), jax.jacfwd(f)(0.7))


@pytest.mark.parametrize("checkpoints", ["all", jax.checkpoint_policies.dots_saveable])
def test_a_loop_whose_gradient_nobody_asks_for_needs_no_bound(checkpoints):
    points = jnp.array([3.0, 2.0, 0.5, 4.0])

    def f(x):
        def step(s):
            i, best, found = s
            near = (points[i] - x) ** 2
            return i + 1, jnp.minimum(near, best), jnp.where(near < best, i, found)

        start = (jnp.int32(0), jnp.asarray(jnp.inf), jnp.int32(0))
        _, best, found = jax.lax.while_loop(lambda s: s[1] > 0.02, step, start)
        return best, (points[found] - x) ** 2

    replaced = loopkit.checkpointed(f, checkpoints=checkpoints)
    slope = jax.grad(lambda x: f(x)[1])(0.6)
    for jitted in (lambda g: g, jax.jit):
        assert_close(jitted(jax.grad(lambda x: replaced(x)[1]))(0.6), slope)
        assert_close(jitted(jax.jacfwd(replaced))(0.6), jax.jacfwd(f)(0.6))
        with pytest.raises(ValueError, match='"all" or a policy only if the number of steps is'):
            jitted(jax.grad(lambda x: replaced(x)[0]))(0.6)
