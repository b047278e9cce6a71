"""Narrowing: which loops do it, to how many lanes, and what `explain` says of it."""

import functools as ft
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._engine.lanes.many_lanes import _narrower
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.steps import evaluate
from test_lanes import NS, XS, grow, grow_in_python

HERE = "test_where_lanes_narrow.py"


def compiled(f, *args):
    return re.sub("jit_.*?[ ,]", "", jax.jit(f).lower(*args).as_text())


@pytest.mark.exhaustive
def test_where_it_does_not_apply_programs_are_the_same():
    few, many = jnp.arange(8), jnp.arange(64)
    xs, more = (n.astype(float) * 0.1 for n in (few, many))
    for lanes in (None, "compact"):
        for f in (ft.partial(grow, w=0.9, lanes=lanes), jax.grad(ft.partial(grow, lanes=lanes), 2)):
            wait = ft.partial(f.func if isinstance(f, ft.partial) else f, lanes="wait")
            if not isinstance(f, ft.partial):
                wait = jax.grad(ft.partial(grow, lanes="wait"), 2)
                args, axes = (few, xs, 0.9), (0, 0, None)
            else:
                wait, args, axes = ft.partial(grow, w=0.9, lanes="wait"), (few, xs), 0
            assert compiled(jax.vmap(f, axes), *args) == compiled(jax.vmap(wait, axes), *args)
        alike = lambda x, lanes=lanes: grow(5, x, 0.9, lanes=lanes)  # a predicate without lanes
        wait = lambda x: grow(5, x, 0.9, lanes="wait")
        assert compiled(jax.vmap(alike), more) == compiled(jax.vmap(wait), more)
    narrow, wait = (ft.partial(grow, w=0.9, lanes=how) for how in ("compact", "wait"))
    program = compiled(jax.vmap(narrow), many, more)
    assert program.count("stablehlo.while") > compiled(jax.vmap(wait), many, more).count(
        "stablehlo.while"
    )


def of_size(lanes, n, x, length=1000, effect=False, memory=None):
    """So many steps, each of which takes 0.1 microseconds by a lane of 64 numbers."""
    w = jnp.ones((x.size, x.size)) / x.size

    def body(c):
        if effect:
            jax.debug.callback(lambda n: None, c[0])
        return c[0] - 1, jnp.tanh(c[1] @ w)

    options = {"max_steps": length, "memory": memory, "lanes": lanes}
    return loopkit.while_loop(lambda c: c[0] > 0, body, (n, x), **options)[1]


@pytest.mark.exhaustive
def test_none_decides_by_what_a_step_costs(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")

    def narrows(count, size, of=lambda f: f, **options):
        args = jnp.arange(count), jnp.ones((count, size))
        program = lambda how: compiled(jax.vmap(of(ft.partial(of_size, how, **options))), *args)
        none, wait, compact = map(program, (None, "wait", "compact"))
        assert none in (wait, compact)
        assert wait != compact
        return none == compact

    assert narrows(256, 64)
    assert not narrows(32, 128), "few lanes"
    assert not narrows(256, 2), "cheap steps"
    assert not narrows(128, 64, length=3), "few steps"
    assert not narrows(256, 64, effect=True), "what steps tell keeps its order"
    assert not narrows(256, 64, memory="10 MB"), "it may be too little for several loops"
    slope = lambda f: jax.grad(lambda x, n: f(n, x).sum())
    each = lambda f: lambda n, x: slope(f)(x, n)
    assert not narrows(256, 64, each), "steps would be run again"
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not narrows(256, 64), "they may be spread"
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not narrows(256, 64), "few lanes take as long as many"


def test_explain_says_what_was_decided(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    many = jnp.arange(256), jnp.ones((256, 64))
    said = loopkit.explain(jax.vmap(ft.partial(of_size, None)), *many)
    assert [loop.lanes for loop in said.loops] == [(256,), (112,), (40,), (12,)]
    assert f"loopkit.while_loop, 112 lanes  {HERE}:" in str(said)
    said = loopkit.explain(jax.vmap(ft.partial(of_size, "wait")), *many)
    assert [loop.lanes for loop in said.loops] == [(256,)]
    assert "lanes that wait" not in str(said), "they were told to"
    nested = jax.vmap(jax.vmap(ft.partial(of_size, "wait")))
    said = str(loopkit.explain(nested, *(v[None] for v in many)))
    assert "loopkit.while_loop, 1 x 256 lanes" in said
    assert " lanes " not in str(loopkit.explain(of_size, None, 3, jnp.ones(4)))


@pytest.mark.slow
def test_explain_says_why_lanes_wait(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")

    def why(count, size, of=lambda f: f, **options):
        args = jnp.arange(count), jnp.ones((count, size))
        said = loopkit.explain(jax.vmap(of(ft.partial(of_size, None, **options))), *args)
        lines = [line for line in str(said).splitlines() if line.startswith("lanes that wait")]
        return "; ".join(re.sub(rf"lanes that wait, {HERE}:\d+: they ", "", w) for w in lines)

    each = lambda f: lambda n, x: jax.grad(lambda x: f(n, x).sum())(x)
    assert why(256, 64) == ""
    assert why(32, 128) == "are fewer than 64"
    assert re.fullmatch(r"take a step in \d\.\d microseconds, of 10 or more", why(256, 2))
    assert why(128, 64, length=3) == "would gain less than phases take to compile"
    assert why(256, 64, effect=True) == "have steps that call the host"
    assert why(256, 64, memory="10 MB") == "are given `memory`, for one loop"
    assert why(256, 64, each).endswith("read each other, or have derivatives one by one")
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert why(256, 64) == "may be spread over devices"
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert why(256, 64) == "are not run by a CPU"


def test_widths_that_are_chosen():
    for count in (*range(9, 70), 256, 300, 1000, 1024, 65_536):
        chosen = _narrower(count)
        assert all(a > b >= 8 for a, b in itertools.pairwise((count, *chosen)))
        assert len(chosen) <= max(1, np.log(count / 12) / np.log(4) + 1)


def test_a_phase_ends_once_few_lanes_are_left():
    """Two of four, whose slowest would take nine steps."""

    def run(n, x):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]))
        return loopkit.while_loop(lambda c: c[0] < n, step, (0, x), lanes=(2,))

    args = jnp.array([1, 9, 2, 3]), jnp.ones(4)
    (eqn,) = (e for e in jax.make_jaxpr(jax.vmap(run))(*args).eqns if "loop" in e.params)
    first = phases_of(eqn.params["loop"]).phase(0)
    operands = first.split([args[0], jnp.zeros(4, int), args[1]])[0]
    counts, _ = evaluate(first, operands)
    assert counts.tolist() == [1, 2, 2, 2]


def test_lanes_that_speak_wait():
    """They read each other by name, so that all of them are needed."""

    def run(lanes, n, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) + lax.psum(c[1], "lane") / 9)
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), lanes=lanes)[1]

    got, want = (
        jax.vmap(ft.partial(run, lanes), axis_name="lane")(NS, XS) for lanes in ((4, 2), "wait")
    )
    assert_close(got, want)


@pytest.mark.slow
def test_widths_that_exceed_the_lanes():
    """They are left out, as where an outer loop has narrowed."""
    for lanes in ((7, 2), (6, 2), (9, 7), (9, 6)):
        assert_close(jax.vmap(ft.partial(grow, w=0.9, lanes=lanes))(NS, XS), grown(0.9))
    text = jax.jit(jax.vmap(ft.partial(grow, w=0.9, lanes=(7, 2)))).lower(NS, XS).as_text()
    assert text == jax.jit(jax.vmap(ft.partial(grow, w=0.9, lanes=(2,)))).lower(NS, XS).as_text()
    assert_close(grow(3, 0.3, 0.9, lanes=(7, 2)), grow_in_python(3, 0.3, 0.9))  # without lanes


def grown(w):
    return jnp.stack([jnp.asarray(grow_in_python(n, x, w)) for n, x in zip(NS, XS, strict=True)])


@pytest.mark.exhaustive
def test_a_linear_function_applied_in_another_loop():
    """All derivatives of a loop agree on its phases, wherever they are taken."""

    def run(n, x, lanes, checkpoints):
        linear = jax.linearize(lambda x: grow(n, x, 0.9, lanes=lanes), x)[1]
        body = lambda c: (c[0] + 1, c[1] + linear(jnp.sin(c[1])))
        how = {"max_steps": 5, "checkpoints": checkpoints}
        return loopkit.while_loop(lambda c: c[0] < 3, body, (0, x), **how)[1]

    slopes = lambda *how: jax.jit(jax.vmap(jax.grad(lambda x, n: run(n, x, *how))))(XS, NS)
    assert_close(slopes((4, 2), loopkit.Plan(2)), slopes("wait", loopkit.Plan(2)))
    text = '`lanes` must be "wait" if the loop is linearised outside another loop'
    with pytest.raises(NotImplementedError, match=text):
        slopes((4, 2), "all")


@pytest.mark.exhaustive
def test_a_linear_loop_applied_in_another_loop():
    """The loop saves the steps alone, which is enough if the residuals of a step are stored."""

    def run(n, x, lanes):
        halves = lambda c: (c[0] + 1, c[1] * 0.9)
        how = {"max_steps": 9, "lanes": lanes, "checkpoints": "all"}
        f = lambda x: loopkit.while_loop(lambda c: c[0] < n, halves, (0, x), **how)[1]
        linear = jax.linearize(f, x)[1]
        body = lambda c: (c[0] + 1, c[1] + linear(jnp.sin(c[1])))
        how = {"max_steps": 5, "checkpoints": "all"}
        return loopkit.while_loop(lambda c: c[0] < 3, body, (0, x), **how)[1]

    slopes = lambda lanes: jax.jit(jax.vmap(jax.grad(lambda x, n: run(n, x, lanes))))(XS, NS)
    assert_close(slopes((4, 2)), slopes("wait"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [{}, {"checkpoints": 8}, {"memory": "600 kB"}], ids=str)
def test_phases_share_a_budget(how):
    """The gradient needs what that of lanes that wait does, and two carries to gather them."""
    w = jnp.eye(16) / 2

    def temporary(lanes):
        def total(x, n):
            body = lambda c: (c[0] - 1, jnp.tanh(c[1] @ w))
            run = lambda n, x: loopkit.while_loop(
                lambda c: c[0] > 0, body, (n, x), max_steps=1000, lanes=lanes, **how
            )
            return jnp.sum(jax.vmap(run)(n, x)[1])

        args = jnp.ones((256, 16)), jnp.arange(256)
        return jax.jit(jax.grad(total)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary("compact") < temporary("wait") + 2 * 256 * 17 * 8


# ---------------------------------------------------------------- other people's loops


@pytest.mark.exhaustive
def test_loops_of_lax():
    halvings = lambda x: lax.while_loop(lambda x: x > 1.0, lambda x: x / 2, x)
    xs = jnp.asarray([9.0, 1.0, 100.0, 3.0, 0.5, 40.0])
    want = jax.vmap(halvings)(xs)
    for f in (
        jax.vmap(loopkit.checkpointed(halvings, lanes=(3, 1))),
        loopkit.checkpointed(jax.vmap(halvings), lanes="wait"),
    ):
        assert_close(f(xs), want)
        assert_close(jax.grad(lambda xs, f=f: jnp.sum(f(xs)))(xs), want / xs)
    with loopkit.replace_lax_loops(lanes=(3, 1)):
        assert len(loopkit.explain(jax.vmap(halvings), xs).loops) == 3


@pytest.mark.slow
def test_a_predicate_that_asks_all_lanes():
    """equinox's loops go on in all lanes while one does; lanes that narrow are asked one by one."""
    eqxi = pytest.importorskip("equinox.internal")

    def run(n, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1] / 2)
        return eqxi.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=16, kind="lax")[1]

    ns = np.tile(NS, 3)
    xs = np.linspace(-1, 1, 18)
    want = jax.vmap(run)(ns, xs)
    programs = {
        lanes: jax.vmap(loopkit.checkpointed(run, lanes=lanes)) for lanes in ("wait", (4, 2))
    }
    phases = lambda lanes: len(loopkit.explain(programs[lanes], ns, xs).loops)
    assert phases("wait") == 1
    assert phases((4, 2)) == 3
    slopes = [jax.grad(grow_in_python, 1)(n, x, 1.0) for n, x in zip(ns, xs, strict=True)]
    for f in programs.values():
        assert_close(f(ns, xs), want)
        assert_close(jax.grad(lambda xs, f=f: jnp.sum(f(ns, xs)))(xs), jnp.stack(slopes))
