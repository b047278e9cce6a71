"""Sites: `only` is told in how many loops of lax a loop stands, and in which."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.scipy.optimize import minimize

import loopkit
from derivatives import assert_close


def grows(x):
    return lax.while_loop(lambda x: x < 30.0, lambda x: x * x + 1.0, x)


def powers(x):
    return lax.scan(lambda c, _: (c * x, None), x, length=2)[0]


def times(f, x, n=3):
    return lax.scan(lambda c, _: (f(c), None), x, length=n)[0]


@jax.custom_jvp
def with_jvp(x):
    return powers(x)


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0] * grows(p[0])))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * powers(x),))


def in_predicate(x):
    return lax.while_loop(lambda x: powers(x) < 9.0, lambda x: x + 1.0, x)


S, W = "scan", "while_loop"
NESTS: dict[str, tuple[Callable, list]] = {
    "one": (powers, [(S,)]),
    "scan in scan": (lambda x: times(powers, x), [(S, S), (S,)]),
    "while in scan": (lambda x: times(grows, x), [(W, S), (S,)]),
    "scan in while": (
        lambda x: lax.while_loop(lambda x: x < 9.0, lambda x: powers(x) + 1, x),
        [(S, W), (W,)],
    ),
    "scan in a predicate": (in_predicate, [(S, W), (W,)]),
    "three": (
        lambda x: times(lambda x: times(grows, x), x),
        [(W, S, S), (S, S), (S,)],
    ),
    "one after another": (lambda x: powers(powers(x)), [(S,), (S,)]),
    "jit": (lambda x: times(jax.jit(powers), x), [(S, S), (S,)]),
    "loops in jit": (jax.jit(lambda x: times(powers, x)), [(S, S), (S,)]),
    "cond": (
        lambda x: times(lambda x: lax.cond(x > 0, powers, jnp.cos, x), x),
        [(S, S), (S,)],
    ),
    "switch": (lambda x: lax.switch(1, [jnp.cos, powers], x), [(S,)]),
    "vmap": (lambda x: jax.vmap(lambda x: times(powers, x))(x[None])[0], [(S, S), (S,)]),
    "vmap in a loop": (lambda x: times(lambda x: jax.vmap(powers)(x[None])[0], x), [(S, S), (S,)]),
    "checkpoint": (lambda x: times(jax.checkpoint(powers), x), [(S, S), (S,)]),
    "checkpoint around": (jax.checkpoint(lambda x: times(powers, x)), [(S, S), (S,)]),
    "grad inside": (lambda x: times(jax.grad(powers), x), [(S, S), (S,)]),
    "grad of a nest inside": (jax.grad(lambda x: times(powers, x)), [(S, S), (S,)]),
    "jvp inside": (lambda x: jax.jvp(lambda x: times(powers, x), (x,), (x,))[1], [(S, S), (S,)]),
    "fori_loop": (
        lambda x: lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, 2, lambda _, x: x + 1, x), x),
        [(S, S), (S,)],
    ),
    "fori_loop to a traced bound": (
        lambda x: lax.fori_loop(0, x.astype(int), lambda _, x: powers(x), x),
        [(S, W), (W,)],
    ),
    "lax.map": (lambda x: lax.map(powers, x[None])[0], [(S, S), (S,)]),
    "map inside": (lambda x: times(lambda x: lax.map(jnp.sin, x[None])[0], x), [(S, S), (S,)]),
    "associative_scan": (
        lambda x: lax.associative_scan(jax.vmap(lambda a, b: a + powers(b)), jnp.stack([x, x]))[0],
        [(S,)],
    ),
    "custom_jvp": (lambda x: times(with_jvp, x), [(S, S), (S,)]),
}


def all_sites(f, by, **settings):
    sites = []

    def only(site):
        sites.append(site)
        return True

    if by == "checkpointed":
        jax.make_jaxpr(loopkit.checkpointed(f, only=only, **settings))(1.5)
    else:
        with loopkit.replace_lax_loops(only=only, **settings):
            jax.make_jaxpr(f)(1.5)
    return sites


def nest(site):
    """The kinds of a loop and of those around it, from the inside."""
    return () if site is None else (site.kind, *nest(site.outer))


@pytest.mark.every_case
@pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])
@pytest.mark.parametrize("name", NESTS)
def test_only_is_told_where_a_loop_stands(name, by):
    f, wanted = NESTS[name]
    sites = all_sites(f, by)
    found = list(map(nest, sites))
    # Lax traces what a step does twice where the carry's type changes.
    assert sorted(set(found)) == sorted(set(wanted))
    assert len(found) >= len(wanted)
    assert [site.depth for site in sites] == [len(kinds) - 1 for kinds in found]


def test_the_loop_around_is_described():
    def f(x):
        def body(c, x):
            with jax.named_scope("inner"):
                return powers(c[0]), x

        with jax.named_scope("outer"):
            return lax.scan(lambda c, x: ((body(c, x)[0], c[1]), x), (x, x), jnp.ones(7))[0]

    inner, outer = all_sites(f, "checkpointed")
    assert inner.outer.length == 7
    assert inner.outer.carry_bytes == 16
    assert inner.outer.name_stack == outer.name_stack == "outer"
    assert inner.outer.source == outer.source
    assert outer.outer is None
    assert (outer.depth, outer.outer, outer.length) == (0, None, 7)
    assert "test_loop_sites.py" in outer.source


@pytest.mark.slow
def test_a_cached_function_is_asked_about_in_each_place():
    """jit keeps what it has traced, and lax the steps of a loop: not for loops elsewhere."""
    inner = jax.jit(powers)
    body = lambda c, _: (inner(c), None)
    twice = lambda c, _: (lax.scan(body, c, length=2)[0], None)
    f = lambda x: lax.scan(twice, lax.scan(body, inner(x), length=2)[0], length=2)[0]
    for by in ("checkpointed", "replace_lax_loops"):
        assert [s.depth for s in all_sites(f, by)] == [0, 1, 0, 2, 1, 0]
    assert_close(loopkit.checkpointed(f, only=outermost)(1.1), f(1.1))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])
def test_loops_in_rules_stand_where_the_rule_is_called(by):
    sites = []

    def only(site):
        sites.append(nest(site))
        return True

    f = lambda x: times(lambda x: with_vjp(with_jvp(x)), x)
    wanted = jax.grad(lambda x: [x := with_vjp(with_jvp(x)) for _ in range(3)][-1])
    with loopkit.replace_lax_loops():
        slope = wanted(1.5)
    if by == "checkpointed":
        assert_close(jax.grad(loopkit.checkpointed(f, only=only))(1.5), slope)
    else:
        with loopkit.replace_lax_loops(only=only):
            assert_close(jax.grad(f)(1.5), slope)
    assert set(sites) == {(S,), (S, S), (W, S)}


@pytest.mark.exhaustive
def test_what_lax_makes_of_a_loop_that_is_left_is_not_asked_about():
    """Its derivatives, and the same for many rows, are loops too."""
    asked = []

    def f(x):
        inner = lambda x: times(lambda x: powers(jnp.sin(x)), x)
        many = jax.vmap(jax.grad(inner))(jnp.stack([x, 2 * x])).sum()
        return many + jax.jvp(jax.jit(inner), (x,), (x,))[1]

    def only(site):
        asked.append((nest(site), site.carry_bytes))
        return False

    for how in (jax.make_jaxpr, jax.jit, jax.grad):
        asked.clear()
        with loopkit.replace_lax_loops(only=only, strict=False):
            how(lambda x, how=how: f(x))(0.5)
        assert set(asked) == {((S, S), 8), ((S,), 8)}


def outermost(site):
    """Scans inside other loops are left to lax."""
    return site.kind != "scan" or site.depth == 0


def replaced(text):
    return text.count("loopkit_while["), text.count(" scan["), text.count(" while[")


@pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])
@pytest.mark.parametrize(
    ("f", "wanted"),
    [
        (lambda x: times(powers, x), (1, 1, 0)),
        (lambda x: times(lambda x: times(powers, x), x), (1, 2, 0)),
        (lambda x: times(grows, x), (2, 0, 0)),
        (lambda x: times(lambda x: times(grows, x), x), (2, 1, 0)),
        (lambda x: powers(powers(x)), (2, 0, 0)),
        (in_predicate, (1, 1, 0)),
        (lambda x: times(jax.jit(powers), jax.jit(powers)(x)), (2, 1, 0)),
    ],
)
def test_outermost_leaves_scans_inside_other_loops(f, wanted, by):
    if by == "checkpointed":
        g = loopkit.checkpointed(f, only=outermost)
        assert replaced(str(jax.make_jaxpr(g)(1.5))) == wanted
        assert_close(jax.grad(g)(1.1), jax.jacfwd(f)(1.1))
    else:
        with loopkit.replace_lax_loops(only=outermost):
            assert replaced(str(jax.make_jaxpr(lambda x: f(x))(1.5))) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])
def test_loops_of_jax_inside_loops_of_jax(by):
    """No line of anyone else's stands between the two."""
    valley = lambda a: minimize(lambda p: jnp.sum((p - a) ** 2), jnp.zeros(2), method="BFGS").x[0]
    kinds = {nest(site) for site in all_sites(valley, by)}
    assert kinds == {(W,), (W, W), (W, W, W)}
    text = str(jax.make_jaxpr(loopkit.checkpointed(jax.random.poisson))(jax.random.key(0), 2.0))
    assert "loopkit_while" in text


@pytest.mark.parametrize("by", ["checkpointed", "replace_lax_loops"])
def test_the_source_of_a_loop_in_a_rule(by):
    """The source is the line where the loop, or the rule around it, was written."""
    (site,) = all_sites(jax.grad(with_vjp), by)
    assert site.source.endswith("(powers)")
    sites = all_sites(jax.grad(with_jvp), by)
    assert all("test_loop_sites.py" in site.source for site in sites), sites
