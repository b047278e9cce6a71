"""Loops of lax that stay as they are: which and why, and when that is an error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close

BOTH = pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])


def twice(x):
    return lax.scan(lambda c, _: (jnp.sin(c) * x, None), x, length=2)[0]


def halved(x):
    return lax.while_loop(lambda c: c > 1.0, lambda c: c / 2, x)


def told(x):
    """A step that asks the host for a number."""
    step = lambda c, _: (io_callback(np.sin, jax.ShapeDtypeStruct((), "float64"), c), None)
    return lax.scan(step, x, length=3)[0]


def of_references(x):
    total = jax.new_ref(x)

    def step(c, _):
        total[...] += c
        return c, None

    return lax.scan(step, x, length=3)[0] + total[...]


def with_a_reference(x):
    def step(c, _):
        ref = jax.new_ref(c)
        ref[...] *= 2
        return ref[...], None

    return lax.scan(step, x, length=3)[0]


WHY = {
    told: "its steps get values from the host",
    of_references: "it uses references to memory, or other values that are not arrays",
    with_a_reference: "its steps make references to memory",
}


def run(by, f, x=1.5, **settings):
    if by == "checkpointed":
        return loopkit.checkpointed(f, **settings)(x)
    with loopkit.replace_lax_loops(**settings):
        return f(x)


@BOTH
@pytest.mark.parametrize("f", WHY)
def test_a_loop_that_cannot_be_replaced(f, by):
    """It stays lax's, and `explain` says why; strict, it is an error unless `only` leaves it."""
    where = rf"the scan at \S+test_left_loops\.py:\d+ \({f.__name__}\): {WHY[f]}"
    with pytest.raises(ValueError, match=rf"{by}: `strict` can be True only where .*{where}"):
        run(by, f, strict=True)
    assert_close(run(by, f), f(1.5))
    g = lambda x: f(x) + twice(x)
    assert_close(run(by, g, strict=True, only=lambda site: site.length == 2), g(1.5))
    (left,) = loopkit.explain(lambda x: run(by, g, x), 1.5).left
    assert left.why == WHY[f]
    assert (left.site.length, left.site.depth) == (3, 0)
    assert f.__name__ in left.site.source


def test_a_symbolic_length_is_a_reason():
    (n,) = jax.export.symbolic_shape("n")
    xs = jax.ShapeDtypeStruct((n,), "float64")
    loop = lambda xs: lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0]
    strict = loopkit.checkpointed(loop, strict=True)
    with pytest.raises(ValueError, match="its number of steps is symbolic"):
        jax.export.export(jax.jit(strict))(xs)
    assert_close(strict(jnp.ones(3)), jnp.asarray(3.0))


@BOTH
def test_only_has_to_choose_a_loop(by):
    """The error lists the loops that there are, again where JAX has them in its caches."""
    f = jax.jit(lambda x: halved(twice(x)))
    only = lambda site: site.kind == "fori_loop"
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{by}: `only` must choose a loop of") as caught:
            run(by, f, only=only)
        lines = re.findall(r"the (\w+) at \S+test_left_loops\.py:\d+ \((\w+)\)", str(caught.value))
        assert lines == [("scan", "twice"), ("while_loop", "halved")]
        assert "of 8 B in the carry" in str(caught.value)
    assert_close(run(by, f, only=only, strict=False), f(1.5))
    assert_close(run(by, jnp.sin, only=lambda site: False), jnp.sin(1.5))


@BOTH
def test_only_that_chose_a_loop_before_is_not_asked_about_it_again(by):
    """JAX has the chosen loop in its caches, and only the other one is left."""
    inner = jax.jit(twice)
    only = lambda site: site.kind == "scan"
    assert_close(run(by, inner, only=only), inner(1.5))
    assert_close(run(by, lambda x: halved(inner(x)), only=only), halved(inner(1.5)))


@pytest.mark.slow
@BOTH
def test_only_may_choose_a_loop_in_a_rule(by):
    """JAX traces it when it differentiates."""

    @jax.custom_vjp
    def sin(x):
        return jnp.sin(x)

    sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * halved(jnp.cos(x)),))
    f = lambda x: sin(twice(x))
    chosen = lambda site: site.kind == "while_loop"
    if by == "checkpointed":
        slope = jax.grad(loopkit.checkpointed(f, only=chosen))(0.7)
    else:
        with loopkit.replace_lax_loops(only=chosen):
            slope = jax.grad(f)(0.7)
    assert_close(slope, jax.grad(f)(0.7))


def test_an_only_that_nobody_can_refer_to():
    class Choose:
        __slots__ = ("kind",)

        def __call__(self, site):
            return site.kind == self.kind

    only = Choose()
    only.kind = "scan"
    assert_close(loopkit.checkpointed(twice, only=only)(1.5), twice(1.5))
    only.kind = "none"
    with pytest.raises(ValueError, match="`only` must choose a loop of lax"):
        loopkit.checkpointed(twice, only=only)(jnp.ones(3))


def test_a_function_without_loops_is_no_error_unless_strict():
    assert_close(loopkit.checkpointed(jnp.sin, strict=False)(1.5), jnp.sin(1.5))
    expected = r"checkpointed: `strict` can be True only where `fn` has a loop of lax"
    with pytest.raises(ValueError, match=expected):
        loopkit.checkpointed(jnp.sin, strict=True)(1.5)
    with loopkit.replace_lax_loops(strict=True):  # JAX may have all of a program in its caches
        jnp.sin(1.5)


def test_a_scan_that_stores_everything_stays_as_it_is_when_strict():
    f = lambda x: twice(halved(x))
    kept = loopkit.checkpointed(f, checkpoints="all", max_steps=4, strict=True)
    assert_close(jax.grad(kept)(1.5), jax.jacfwd(f)(1.5))
    (left,) = loopkit.explain(kept, 1.5).left
    assert left.why == "lax's own scan stores every step already"


def test_explain_lists_what_was_left():
    """Also below other loops, in gradients, and where JAX has the function in its caches."""

    def nested(x):
        return lax.scan(lambda c, _: (halved(twice(c)), None), x, length=5)[0]

    f = jax.jit(jax.grad(loopkit.checkpointed(nested, only=lambda site: site.kind != "scan")))
    f(0.5)
    found = loopkit.explain(f, 0.5)
    assert [(e.site.length, e.site.depth, e.why) for e in found.left] == [
        (2, 1, "`only` leaves it"),
        (5, 0, "`only` leaves it"),
    ]
    lines = [line for line in str(found).splitlines() if line.startswith("left to lax, ")]
    assert len(lines) == 2
    said = r"left to lax, test_left_loops\.py:\d+ \(twice\): `only` leaves it"
    assert re.fullmatch(said, lines[0])
    assert loopkit.explain(nested, 0.5).left == ()
    assert loopkit.explain(loopkit.checkpointed(nested), 0.5).left == ()
