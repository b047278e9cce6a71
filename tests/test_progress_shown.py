"""Displays of progress: a line, tqdm, an object; and values that are refused."""

import sys

import jax
import jax.numpy as jnp
import pytest

import loopkit
from kinds import KINDS
from loopkit._progress import progress
from recorded_bars import Plain, Recorder
from shown_loops import ONES, STOPS, looped, nested, step, stops_at
from turns import in_turn

WRONG = {
    "a word": ("bar", ValueError, '"tqdm", "line" or an object with start.*Got: \'bar\''),
    "a number": (3, TypeError, "an object with start.*Got: 3 of type int"),
    "a flag": (True, TypeError, "Give the object the three methods[.] Got: True of type bool"),
    "a class": (Plain, TypeError, "Pass an instance of the class"),
    "two methods": (type("Two", (), {"start": len, "close": len})(), TypeError, "of type Two"),
}
CALLS = {
    "scan": lambda p: loopkit.scan(step, 0.3, ONES, progress=p),
    "while_loop": lambda p: loopkit.while_loop(lambda x: x < 3, lambda x: x + 1, 0, progress=p),
    "fori_loop": lambda p: loopkit.fori_loop(0, 3, lambda _, x: x, 0.3, progress=p),
    "unbounded_scan": lambda p: loopkit.unbounded_scan(step, 0.3, ONES, **STOPS, progress=p),
    "ragged_scan": lambda p: loopkit.ragged_scan(step, 0.3, [ONES], progress=p),
    "blocked": lambda p: loopkit.blocked(jnp.sin, progress=p),
    "checkpointed": lambda p: loopkit.checkpointed(jnp.sin, progress=p),
    "replace_lax_loops": lambda p: loopkit.replace_lax_loops(progress=p).__enter__(),
}


@pytest.mark.every_case
@pytest.mark.parametrize(("function", "value"), in_turn(CALLS, WRONG, of=3))
def test_wrong_arguments(function, value):
    given, error, text = WRONG[value]
    if value == "a class" and function == "unbounded_scan":
        given = Recorder
    with pytest.raises(error, match=f"loopkit.{function}: `progress` must be .*{text}"):
        CALLS[function](given)


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda _: None)
    text = '`progress` can be "tqdm" only if the package .* Run `pip install tqdm`'
    with pytest.raises(ImportError, match=text):
        CALLS["scan"]("tqdm")


def test_not_with_a_symbolic_length():
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda xs: loopkit.scan(step, 0.3, xs, progress="line"))
    with pytest.raises(
        ValueError, match=r"`length` must be known if the call has arguments that lax"
    ):
        jax.export.export(f)(jax.ShapeDtypeStruct((n,), jnp.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_line(capsys, kind):
    """Outside a terminal, each bar ends with one line."""
    jax.block_until_ready(jax.grad(lambda x: looped(kind, "line", x, 1234))(0.3))
    first, second = capsys.readouterr().err.splitlines()
    name = {"fori": "fori_loop", "while": "while_loop"}.get(kind, "scan")
    most = "1,235" if kind == "until" else "1,234"
    assert first.startswith(f"{name}: 1,234 of {most} steps, ")
    assert second.startswith(f"{name}, backward: 1,234 of 1,234 steps, ")


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self): ...


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "OFTEN", -1.0)


@pytest.mark.usefixtures("often")
def test_a_line_in_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    x, n = jnp.asarray([0.1, 0.2]), jnp.asarray([2, 7])
    jax.block_until_ready(jax.jit(jax.vmap(lambda x, n: stops_at("line", x, n)))(x, n))
    *_, last = terminal.text.split("\r")
    assert terminal.text.count("\n") == 1
    assert last.startswith("while_loop: 7 of 9 steps, 2 of 2 lanes done, ")


def test_tqdm(capsys):
    jax.block_until_ready(jax.grad(lambda x: nested("tqdm", x))(0.3))
    text = capsys.readouterr().err
    for line in ("scan: 100%", "4/4", "scan, backward: 100%"):
        assert line in text
    jax.vmap(lambda x, n: stops_at("tqdm", x, n))(jnp.ones(2), jnp.asarray([2, 7]))
    assert "2 of 2 lanes done" in capsys.readouterr().err


def test_tqdm_in_a_notebook(monkeypatch):
    """It is shown as often as in a terminal, and the outermost bar stays."""
    from tqdm import auto, std

    made = []

    class OfNotebooks(std.tqdm):
        def __init__(self, *args, **how):
            made.append((how["leave"], how["mininterval"]))
            super().__init__(*args, file=Terminal(), **how)

    OfNotebooks.__module__ = "tqdm.notebook"
    monkeypatch.setattr(auto, "tqdm", type("tqdm", (OfNotebooks,), {"__module__": "tqdm.auto"}))
    jax.block_until_ready(nested("tqdm", 0.3))
    assert made == [(True, progress.OFTEN), *[(False, progress.OFTEN)] * 4]
