"""`every` and `reduce` of a scan whose ys have several leaves, each kept in its own way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from test_some_ys import XS, some
from tolerances import assert_near
from turns import in_turn


def step(carry, x):
    t, h = carry
    h = jnp.sin(h) * x + 0.3
    return (t + 1, h), {"row": h * jnp.array([1.0, x, 2.0]), "count": t * 3, "on": h > 0.5}


def unrolled(h, every, reduce, stop=None, reverse=False, axis=0, truncate=None):
    ys, carry = [], (0, h)
    for t in range(stop or len(XS)):
        if truncate and t and t % truncate == 0:
            carry = jax.lax.stop_gradient(carry)
        carry, y = step(carry, XS[len(XS) - 1 - t if reverse else t])
        ys.append(y)
    out = {}
    for k in y:
        rows, how = jnp.stack([y[k] for y in ys]), reduce[k]
        full = rows[::-1] if reverse else rows
        out[k] = some(rows, len(XS), every, how, reverse) if every or how else full
        out[k] = jnp.moveaxis(out[k], 0, axis) if k == "row" and (every or not how) else out[k]
    return carry[1], out


def scanned(h, every, reduce, stop=None, reverse=False, axis=0, truncate=None, **options):
    until = None if stop is None else lambda carry, y: carry[0] >= stop
    (_, h), ys = loopkit.scan(
        step,
        (0, h),
        XS,
        reverse=reverse,
        every=every,
        reduce=reduce,
        until=until,
        out_axes={"row": axis, "count": 0, "on": 0},
        truncate=truncate,
        **options,
    )
    return h, ys


BY_LEAF = {"row": "mean", "count": "mean", "on": "sum"}, {"row": None, "count": "last", "on": None}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("every", "reduce", "stop", "reverse", "axis", "truncate"),
    in_turn([3, None], BY_LEAF, [None, 7], [False, True], [0, -1], [None, 2, 4], of=11),
)
def test_leaf_by_leaf(every, reduce, stop, reverse, axis, truncate):
    if stop and not every and not all(reduce.values()):
        stop = None  # rows past the stop are those of any scan
    how = every, reduce, stop, reverse, axis, truncate

    def loss(f):
        def total(h):
            h, ys = f(h, *how)
            numbers = jnp.arange(1.0 * ys["row"].size)
            return h + jnp.sum(jnp.cos(ys["row"]) * numbers.sum()), (h, ys)

        return jax.value_and_grad(total, has_aux=True)

    (_, out), slope = jax.jit(loss(scanned))(0.4)
    (_, wanted), wanted_slope = loss(unrolled)(0.4)
    types = lambda tree: jax.tree.map(lambda v: (v.shape, v.dtype), tree)
    assert types(out) == types(wanted)
    assert_near(out, wanted)
    assert_close(slope, wanted_slope)
    if truncate is None:
        with jax.disable_jit():
            assert_near(scanned(0.4, *how), wanted)


def kept(h):
    return scanned(h, 3, BY_LEAF[0])[1]["row"]


MODES = {
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "third": lambda f: jax.grad(jax.grad(jax.grad(lambda h: jnp.sum(jnp.sin(f(h)))))),
    "checkpoint": lambda f: jax.jacrev(jax.checkpoint(f)),
    "linearize": lambda f: lambda h: jax.linearize(f, h)[1](1.0),
    "export": lambda f: lambda h: jax.export.export(jax.jit(f))(h).call(h),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    of_rows = MODES[mode] if mode != "export" else lambda f: f
    wanted = of_rows(lambda h: unrolled(h, 3, BY_LEAF[0])[1]["row"])(jnp.float64(0.4))
    assert_close(MODES[mode](kept)(jnp.float64(0.4)), wanted)


@pytest.mark.slow
def test_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    of_devices = jax.sharding.PartitionSpec("i")
    f = jax.shard_map(jax.vmap(kept), mesh=mesh, in_specs=of_devices, out_specs=of_devices)
    hs = jnp.array([0.1, 0.5, 0.9, 0.3])
    grad = jax.grad(lambda f, h: jnp.sum(jnp.sin(f(h))), argnums=1)
    assert_close(jax.jit(f)(hs), jax.vmap(kept)(hs))
    wanted = [jax.grad(lambda h: jnp.sum(jnp.sin(kept(h))))(h) for h in hs]
    assert_close(jax.jit(lambda h: grad(f, h))(hs), jnp.stack(wanted))


@pytest.mark.slow
def test_a_step_reports_once():
    seen = []

    def body(h, x):
        jax.debug.callback(lambda t: seen.append(int(t)), h[0])
        return step(h, x)

    rows = lambda h: loopkit.scan(body, (0, h), XS, every=4, reduce="mean")[1]["row"]
    jax.block_until_ready(jax.jit(jax.grad(lambda h: jnp.sum(rows(h))))(0.3))
    jax.effects_barrier()
    assert sorted(seen) == list(range(len(XS)))


@pytest.mark.exhaustive
def test_types():
    def body(carry, x):
        key, h = carry
        y = {"key": key, "half": jnp.asarray(h, "float16"), "small": jnp.int8(100)}
        return (jax.random.split(key)[0], h + 0.001), y

    init = jax.random.key(1), 1.0
    all_ys = loopkit.scan(body, init, length=3000)[1]
    ys = loopkit.scan(body, init, length=3000, every=1000)[1]
    assert ys["key"].dtype == all_ys["key"].dtype
    np.testing.assert_array_equal(
        jax.random.key_data(ys["key"]), jax.random.key_data(all_ys["key"][999::1000])
    )
    reduce = {"key": "last", "half": "mean", "small": "sum"}
    ys = loopkit.scan(body, init, length=3000, reduce=reduce)[1]
    for k, function in (("half", jnp.mean), ("small", jnp.sum)):
        assert ys[k].dtype == function(all_ys[k]).dtype
        assert_near(ys[k], function(all_ys[k]))


@pytest.mark.slow
def test_weak_types_and_promotion():
    """A start that a step promotes; ys are of the types that they have without `every`."""
    body = lambda h, _: (h + 0.5, (h, 1.0))
    wanted = loopkit.scan(body, 0, length=6)[1]
    for how in ({"every": 2}, {"reduce": "last"}, {"every": 2, "reduce": "mean"}):
        got = loopkit.scan(body, 0, length=6, **how)[1]
        assert [v.dtype for v in got] == [v.dtype for v in wanted]
    np.testing.assert_array_equal(loopkit.scan(body, 0, length=6, every=2)[1][0], wanted[0][1::2])


def test_static_leaves():
    body = lambda h, x: (h + x, {"h": h, "name": "a", "act": jnp.tanh})
    ys = loopkit.scan(body, 0.0, XS, every=5)[1]
    assert ys["name"] == "a"
    assert ys["act"] is jnp.tanh
    assert ys["h"].shape == (2,)


def test_nothing_changes_where_it_is_off():
    def text(**how):
        f = lambda h, xs: loopkit.scan(step, (0, h), xs, **how)
        return jax.jit(jax.grad(lambda h, xs: jnp.sum(f(h, xs)[1]["row"]))).lower(0.1, XS).as_text()

    assert (
        text(every=None, reduce=None)
        == text()
        == text(reduce={"row": None, "count": None, "on": None})
    )
    assert text(reduce="last") == text(out_axes=None)


@pytest.mark.parametrize("word", ["sum", "mean", "last"])
def test_what_has_no_rows_needs_no_axis(word):
    """A matrix stacked along its last axis, beside a number that has no axis 1."""
    step = lambda c, _: (c + 1, {"v": c * jnp.ones(3), "s": c})
    own = {"reduce": {"v": None, "s": word}, "length": 4}
    _, want = loopkit.scan(step, 0.0, **own)
    _, got = loopkit.scan(step, 0.0, out_axes=1, **own)
    assert_close(got, {"v": want["v"].T, "s": want["s"]})
    with jax.disable_jit():
        assert_close(loopkit.scan(step, 0.0, out_axes=1, **own)[1], got)


def test_a_tensor_array_is_not_summed():
    start = loopkit.TensorArray.empty(8, jnp.zeros(()))

    def run(reduce):
        step = lambda rows, x: (rows.append(x), {"rows": rows.append(x), "x": x})
        return loopkit.scan(step, start, jnp.arange(6.0), reduce=reduce)[1]

    message = (
        r"`reduce\['rows'\]` can be \"sum\" or \"mean\" only for numbers[.] .*Got: a TensorArray"
    )
    with pytest.raises(ValueError, match=message):
        run("sum")
    got = run({"rows": "last", "x": "sum"})
    assert_close(got["rows"].stack()[:6], jnp.arange(6.0))
    assert got["x"] == 15
