"""`every` and `reduce` of a scan: some of its ys, or what they come to, in place of all."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative
from loopkit import Plan
from problems import TABLE
from reference_loops import LoopkitLoops, PythonLoops
from trials.in_numpy import eagerly
from turns import in_turn

SETTINGS = {
    "every 2": {"every": 2},
    "every 3, means": {"every": 3, "reduce": "mean"},
    "every 2, sums": {"every": 2, "reduce": "sum"},
    "none of so many": {"every": 20},
    "sum": {"reduce": "sum"},
    "mean": {"reduce": "mean"},
    "last": {"reduce": "last"},
}
SCANS = ["scan_xs_ys", "scan_reverse", "scan_until", "scan_until_reverse", "scan_without_xs"]
NESTED = ["scan_in_while", "while_in_scan"]
XS = jnp.linspace(0.2, 1.0, 11)
REDUCED = {"sum": jnp.sum, "mean": jnp.mean, "last": lambda rows, axis: rows.take(-1, axis)}


def some(rows, length, every=None, reduce=None, reverse=False):
    """Select from the rows of the steps taken, in the order in which they were taken."""
    if every is None:
        return REDUCED[reduce](rows, axis=0)
    whole = len(rows) // every
    windows = rows[: whole * every].reshape(whole, every, *rows.shape[1:])
    kept = REDUCED[reduce or "last"](windows, axis=1)
    blank = jnp.zeros((length // every - whole, *kept.shape[1:]), kept.dtype)
    kept = jnp.concatenate([kept, blank])
    return kept[::-1] if reverse else kept


class SomeInPython(PythonLoops):
    def __init__(self, settings, counts=None):
        super().__init__(counts)
        self.settings = settings

    def scan(self, f, init, xs=None, length=None, reverse=False, **how):
        carry, ys, info = super().scan(f, init, xs, length, reverse, **how, return_info=True)

        def of_all(y):
            rows = (y[::-1] if reverse else y)[: int(info.steps)]
            return some(rows, len(y), reverse=reverse, **self.settings)

        return carry, jax.tree.map(of_all, ys)


class SomeOfLoopkit(LoopkitLoops):
    def __init__(self, settings, bound, *given, **options):
        super().__init__(bound, *given, **options)
        self.settings = settings

    def scan(self, *args, **how):
        return super().scan(*args, **self.settings, **how)


def by_loopkit(name, settings, **options):
    problem = TABLE[name]
    loops = SomeOfLoopkit(SETTINGS[settings], problem.bound, **options)
    return problem.flat(problem.through(loops))


def in_python(name, settings, x):
    """The reference near `x`, where it takes as many steps as there."""
    problem = TABLE[name]
    recording = SomeInPython(SETTINGS[settings])
    problem.flat(problem.through(recording))(x)
    again = lambda: SomeInPython(SETTINGS[settings], recording.counts)
    return lambda x: problem.flat(problem.through(again()))(x)


@ft.cache
def expected(name, settings, pattern):
    x = TABLE[name].vector()
    with eagerly():
        return np.asarray(derivative(in_python(name, settings, x), pattern)(x))


WAYS = {
    "default": {},
    "1 carry": {"checkpoints": 1},
    "3 carries": {"checkpoints": 3, "unroll": 2},
    "all": {"checkpoints": "all"},
    "a plan": {"checkpoints": Plan(2, segment=2, store="residuals")},
    "bytes": {"memory": 4000},
}
PATTERNS = ["", "f", "r", "fr", "rf", "rr"]


@pytest.mark.parametrize(("name", "settings", "pattern"), in_turn(SCANS, SETTINGS, PATTERNS, of=12))
def test_transformations(name, settings, pattern):
    turn = SCANS.index(name) + 2 * list(SETTINGS).index(settings)
    way = list(WAYS.values())[turn % len(WAYS)]
    got = jax.jit(derivative(by_loopkit(name, settings, **way), pattern))
    assert_close(got(TABLE[name].vector()), expected(name, settings, pattern))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "settings"), in_turn(NESTED, SETTINGS, of=3))
def test_scans_in_loops(name, settings):
    x = TABLE[name].vector()
    for pattern in ("", "r"):
        got = jax.jit(derivative(by_loopkit(name, settings), pattern))(x)
        assert_close(got, expected(name, settings, pattern))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "lanes", "pattern"),
    in_turn(["scan_until", "scan_reverse"], SETTINGS, [None, (2,)], ["", "f", "r", "fr"], of=10),
)
def test_lanes(name, settings, lanes, pattern):
    x = TABLE[name].vector()
    xs = jnp.stack([x, 1.3 * x, 0.8 * x, 1.1 * x])
    f = by_loopkit(name, settings, **({} if name == "scan_reverse" else {"lanes": lanes}))
    got = jax.jit(jax.vmap(derivative(f, pattern)))(xs)
    wanted = [derivative(in_python(name, settings, x), pattern)(x) for x in xs]
    assert_close(got, jnp.stack(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["f", "r", "fr"])
def test_derivatives_of_lanes(pattern):
    x = TABLE["scan_until"].vector()
    xs = jnp.stack([x, 1.3 * x, 0.8 * x])
    f = by_loopkit("scan_until", "every 3, means")
    got = jax.jit(derivative(lambda v: jax.vmap(f)(v.reshape(xs.shape)).ravel(), pattern))

    def unrolled(v):
        rows = zip(v.reshape(xs.shape), xs, strict=True)
        return jnp.stack([in_python("scan_until", "every 3, means", at)(x) for x, at in rows])

    wanted = derivative(lambda v: unrolled(v).ravel(), pattern)(xs.ravel())
    assert_close(got(xs.ravel()), wanted)


# ---------------------------------------------------------------- with other options


@pytest.mark.slow
def test_other_buffers_and_checks():
    """The rows lie beside the buffers of the caller, which are named as without them."""

    def body(carry, x):
        i, table = carry
        table = table.at[i].set(x * 2)
        return (i + 1, table), table[i] * x

    def loss(xs, **how):
        init = 0, jnp.zeros(8)
        (_, table), ys = loopkit.scan(body, init, xs, **how)
        return jnp.sum(table**2) + jnp.sum(jnp.sin(ys))

    xs = jnp.linspace(0.1, 0.9, 8)
    wanted = jax.grad(lambda xs: jnp.sum(4 * xs**2) + jnp.sum(jnp.sin(2 * xs[2::3] ** 2)))(xs)
    grad = lambda **how: jax.grad(lambda xs: loss(xs, every=3, **how))(xs)
    assert_close(grad(buffers=lambda c: c[1]), wanted)
    assert_close(grad(buffers=(False, True), debug="bounds"), wanted)
    truncated = grad(truncate=2, buffers=(False, True))
    assert_close(truncated[2::3], wanted[2::3] - jnp.where(jnp.arange(8) < 6, 8 * xs, 0.0)[2::3])


def test_information_and_lengths():
    body = lambda h, x: (h + 1, h)
    h, ys, info = loopkit.scan(body, 0.0, length=10, every=4, return_info=True)
    assert (h, info.steps, ys.tolist()) == (10, 10, [3, 7])
    h, ys, info = loopkit.scan(
        body, 0.0, length=10, every=4, until=lambda h, y: y > 5.0, return_info=True
    )
    assert (h, info.steps, ys.tolist()) == (7, 7, [3, 0])
    assert loopkit.scan(body, 0.0, length=0, every=2)[1].shape == (0,)
    assert loopkit.scan(body, 0.0, length=0, reduce="sum")[1] == 0
    assert jnp.isnan(loopkit.scan(body, 0.0, length=0, reduce="mean")[1])
    assert loopkit.scan(body, 0.0, jnp.zeros((0, 2)), reduce="last")[1] == 0
    last = loopkit.scan(body, 0.0, length=10, every=4, out_axes=None)[1]
    assert last == 9  # not stacked: that of the last step


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how",
    [{"every": 100}, {"every": 100, "reduce": "mean"}, {"reduce": "sum"}, {"reduce": "mean"}],
    ids=str,
)
@pytest.mark.parametrize("settings", [{}, {"truncate": 500}, {"stop": True}], ids=str)
def test_memory(how, settings):
    """Neither direction has all rows, of ys or of cotangents: 16 MB of them."""
    settings = dict(settings)
    if settings.pop("stop", False):
        settings["until"] = lambda h, y: y[0] > 9

    def last_rows(h, xs, **how):
        return loopkit.scan(lambda h, x: (jnp.sin(h) * x, h * 2), h, xs, **settings, **how)[1]

    def temporary(**how):
        loss = lambda h, xs: jnp.sum(last_rows(h, xs, **how) ** 2)
        args = jnp.ones(500), jnp.ones(4000)
        made = [jax.jit(f).lower(*args).compile() for f in (loss, jax.grad(loss, (0, 1)))]
        return [m.memory_analysis().temp_size_in_bytes for m in made]

    without, [value, grad] = temporary(), temporary(**how)
    assert min(without) >= 16e6 or "truncate" in settings
    assert value < 0.5e6
    assert grad < (3.5e6 if "truncate" in settings else 2e6)


def test_traced_once():
    traces = []

    def body(h, x):
        traces.append(1)
        return h + x, h

    for _ in range(3):
        loopkit.scan(body, 0.0, XS, every=4)
    assert len(traces) == 2  # the types of y, then the loop
    loopkit.scan(body, 0.0, XS, every=3)
    loopkit.scan(body, 0.0, XS, every=3, reduce="sum")
    assert len(traces) == 4


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"every": 0}, ValueError, "`every` must be an int >= 1 .steps. or None[.] .*Got: 0"),
        ({"every": 2.0}, TypeError, "`every` must be an int >= 1 .steps. or None[.] .*Got: 2.0"),
        ({"reduce": "max"}, ValueError, r"`reduce` must be None, \"sum\", .* Got: 'max'"),
        ({"reduce": {"a": 3}}, TypeError, r"`reduce\['a'\]` must be None, \"sum\", .* Got: 3"),
        (
            {"reduce": {"a": "sum"}},
            ValueError,
            "`reduce` must be a tree prefix of the y that `f` returns[.] Pass None, .* for each le",
        ),
        ({"reduce": "sum"}, ValueError, r"`reduce\['key'\]` can be \"sum\" or .* for numbers"),
        (
            {"every": 2, "reduce": {"a": "sum", "key": None}, "out_axes": None},
            ValueError,
            r"`out_axes\['a'\]` must be an axis for ys that `every` and `reduce` stack",
        ),
    ],
)
def test_errors(how, error, message):
    key = jax.random.key(0)
    with pytest.raises(error, match=r"loopkit\.scan: " + message):
        loopkit.scan(lambda h, _: (h, {"a": h, "key": key}), 0.0, length=4, **how)


def test_symbolic_lengths():
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda xs: loopkit.scan(lambda h, x: (h, x), 0.0, xs, every=2, reduce="sum"))
    with pytest.raises(ValueError, match="Got: the symbolic n and `every`, `reduce`"):
        jax.export.export(f)(jax.ShapeDtypeStruct((n,), "float64"))
