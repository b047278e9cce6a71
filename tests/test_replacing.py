"""Replacing: the loops that checkpointed replaces, sites, threads, errors, and lax left as it
was."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._foreign.replace import DIVERTED
from test_checkpointed import GROWN, grows


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


def test_sites_inside_the_library_of_jax():
    sites = []

    def f(x):
        return lax.scan(
            lambda c, _: (jnp.searchsorted(xs, c).astype(float) + x, None), x, length=2
        )[0]

    xs = jnp.arange(4.0)
    jax.make_jaxpr(loopkit.checkpointed(f, only=sites.append, strict=False))(1.0)
    assert [s.kind for s in sites] == ["scan", "scan"]
    assert "searchsorted" in sites[0].source
    assert "test_replacing.py" in sites[1].source


def test_counted_while_loops_have_a_length():
    def f(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]

    text = str(jax.make_jaxpr(loopkit.checkpointed(f, checkpoints="all"))(2.0))
    assert "length=5" in text
    assert_close(jax.grad(loopkit.checkpointed(f, checkpoints="all"))(2.0), jnp.asarray(192.0))


@pytest.mark.exhaustive
def test_what_jax_lowers_to_loops_is_left_alone():
    """A scan is lowered to a while loop, and so are special functions: no `max_steps` of theirs."""
    sites = []

    def f(x):
        inner = lambda x: lax.fori_loop(0, 3, lambda _, y: y * 1.1, x)
        x = lax.fori_loop(0, 7, lambda _, x: inner(x), x)
        return x + jax.scipy.special.gammainc(2.0, x)

    wanted = jax.value_and_grad(f)(1.5)
    with loopkit.replace_lax_loops(max_steps=2, only=lambda site: sites.append(site) or True):
        assert_close(jax.value_and_grad(f)(1.5), wanted)
        assert_close(jax.jit(jax.value_and_grad(f))(1.5), wanted)
    assert {site.kind for site in sites} == {"scan"}


@pytest.mark.slow
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
        with loopkit.replace_lax_loops(only=lambda site: False, strict=False):
            trace("nested")
    trace("after")
    assert {k: "loopkit" in text for k, text in texts.items()} == {
        "other": False,
        "here": True,
        "nested": False,
        "after": False,
    }


def test_contexts_of_two_threads_at_once():
    """One is left on an error while the other is inside."""
    texts, inside, left = {}, threading.Barrier(2, timeout=60), threading.Event()
    text = lambda: str(jax.make_jaxpr(lambda x: grows(x))(1.5))

    def first():
        try:
            with loopkit.replace_lax_loops():
                inside.wait()
                raise RuntimeError
        except RuntimeError:
            texts["first, after"] = text()
            left.set()

    def second():
        with loopkit.replace_lax_loops():
            inside.wait()
            assert left.wait(60)
            texts["second, inside"] = text()
        texts["second, after"] = text()

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {k: "loopkit" in t for k, t in texts.items()} == {
        "first, after": False,
        "second, inside": True,
        "second, after": False,
    }
    assert all("bind" not in vars(p) for p in DIVERTED)
