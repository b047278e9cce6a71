"""`debug="finite"`: the step that makes a NaN or an infinity, in whatever is computed of a loop."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import loopkit
from derivatives import assert_close, derivative, expected
from problems import CHECKPOINTS, PROBLEMS, named
from turns import in_turn

ON = {"debug": "finite"}
XS = jnp.array([1.0, 4.0, 0.0, 1.0, 9.0])
PLANS = [None, 1, 2, "all", loopkit.Plan(2, segment=2), loopkit.Plan(100)]


def fails(text, f, *args):
    """The error of `f`, also under jit, which has this in it; and what is to be run again."""
    found = []
    for run in (f, jax.jit(f)):
        with pytest.raises(Exception, match=text) as caught:
            jax.block_until_ready(run(*args))
        assert "FloatingPointError" in f"{caught.type} {caught.value}"
        found.append(loopkit.replay())
    arrays = [[v for v in jax.tree.leaves(r) if is_number(v)] for r in found]
    assert_close(*arrays)
    return found[0]


def is_number(value):
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number)


def root(h, x):
    return jnp.sqrt(h * x), h


def divided(h, x):
    return h / x, h


def while_of(body, xs, h, **how):
    step = lambda c: (c[0] + 1, body(c[1], xs[c[0]])[0])
    return loopkit.while_loop(lambda c: c[0] < len(xs), step, (0, h), **how)[1]


KINDS = {
    "scan": lambda body, xs, h, **how: loopkit.scan(body, h, xs, **how)[0],
    "reverse": lambda body, xs, h, **how: loopkit.scan(body, h, xs[::-1], reverse=True, **how)[0],
    "until": lambda body, xs, h, **how: loopkit.scan(
        body, h, xs, until=lambda h, _: h.sum() < -1, **how
    )[0],
    "fori": lambda body, xs, h, **how: loopkit.fori_loop(
        0, len(xs), lambda i, h: body(h, xs[i])[0], h, **how
    ),
    "while": while_of,
    "bounded": lambda body, xs, h, **how: while_of(body, xs, h, max_steps=9, **how),
    "truncated": lambda body, xs, h, **how: loopkit.scan(body, h, xs, truncate=2, **how)[0],
}
EAGER = {
    "unbounded": lambda body, xs, h, **how: loopkit.unbounded_scan(
        body, h, xs, until=lambda h, _: h.sum() < -1, segment=2, growth=1.0, **how
    )[0],
    "ragged": lambda body, xs, h, **how: loopkit.ragged_scan(body, h, [xs], **how)[0][0],
}


def carry_of(kind, replayed):
    """The user's carry, of what a body is given."""
    return {"fori": lambda r: r[1]}.get(kind, lambda r: r[0][1] if len(r) == 1 else r[0])(replayed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value(kind):
    f = lambda h: KINDS[kind](divided, XS, h, **ON)
    before = fails(
        r"the value of `init.*` must stay finite[.] .*Got: inf.* in step 2, going", f, jnp.ones(2)
    )
    assert_close(carry_of(kind, before), jnp.full(2, 0.25))
    with jax.disable_jit(), pytest.raises(FloatingPointError, match=r"in step 2, going forward"):
        f(jnp.ones(2))
    assert_close(carry_of(kind, loopkit.replay()), jnp.full(2, 0.25))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"truncated"}))
def test_a_tangent(kind):
    f = lambda h: jax.jvp(lambda h: KINDS[kind](root, XS, h, **ON), (h,), (h,))
    before = fails(
        r"the tangent of `init.*` must stay finite[.] .* Got: .* step 2, going forward",
        f,
        jnp.ones(2),
    )
    assert_close(carry_of(kind, before), jnp.full(2, 2.0))


REVERSED = [(k, c) for k, c in itertools.product(KINDS, PLANS) if k != "truncated"]
REVERSED = [(k, c) for k, c in REVERSED if (k, c) != ("while", "all")]


def every_third(cases):
    late = pytest.mark.exhaustive
    return [pytest.param(*c, marks=() if i % 3 == 0 else late) for i, c in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plan"), every_third(REVERSED), ids=str)
def test_a_cotangent(kind, plan):
    """The first step met going back, which has a slope that is infinite: the last."""
    f = jax.grad(lambda h: KINDS[kind](root, XS, h, checkpoints=plan, **ON).sum())
    before = fails(
        r"the cotangent of `init.*` must stay finite[.] .* Got: .* step 4, going backward",
        f,
        jnp.ones(2),
    )
    assert_close(carry_of(kind, before), jnp.zeros(2))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["1 kB", "1 MB"])
def test_a_cotangent_within_a_budget_in_bytes(memory):
    f = jax.grad(lambda h: loopkit.scan(root, h, XS, memory=memory, **ON)[0])
    fails(
        "the cotangent of `init` must stay finite[.] .*Got: inf in step 4, going backward", f, 1.0
    )


@pytest.mark.exhaustive
def test_a_cotangent_of_truncated_steps():
    """Numbers of steps go on from block to block."""

    def f(w, xs):
        step = lambda h, x: (h + w, jnp.sqrt(h * x))
        return loopkit.scan(step, 1.0, xs, truncate=4, **ON)[1].sum()

    for number in (2, 6):
        xs = jnp.ones(9).at[number].set(0.0)
        replayed = fails(
            f"the cotangent of `init` .* in step {number}, going", jax.grad(f), 1.0, xs
        )
        assert_close(replayed, (jnp.asarray(1.0 + number), jnp.asarray(0.0)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", EAGER)
def test_loops_outside_jit(kind):
    f = lambda h: EAGER[kind](divided, XS, h, **ON)
    lane = " in lane 0" if kind == "ragged" else ""
    with pytest.raises(
        Exception, match=f"{kind}_scan: the value of `init` .* in step 2{lane}, going"
    ):
        jax.block_until_ready(f(jnp.ones(2)))
    assert_close(loopkit.replay(), (jnp.full(2, 0.25), jnp.asarray(0.0)))
    g = jax.grad(lambda h: EAGER[kind](root, XS, h, **ON).sum())
    with pytest.raises(Exception, match=f"the cotangent of `init` .* in step 4{lane}, going back"):
        jax.block_until_ready(g(jnp.ones(2)))
    assert_close(loopkit.replay(), (jnp.zeros(2), jnp.asarray(9.0)))
    fine = jax.grad(lambda h: EAGER[kind](root, XS + 1, h, **ON).sum())(jnp.ones(2))
    assert_close(fine, jax.grad(lambda h: EAGER[kind](root, XS + 1, h).sum())(jnp.ones(2)))


SECOND = {
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "forward over reverse": jax.hessian,
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
}


@pytest.mark.parametrize(("mode", "kind"), in_turn(SECOND, ["scan", "bounded", "while"], of=3))
def test_second_order(kind, mode):
    """x^1.5 at zero has a slope, and that has none."""
    body = lambda h, x: (h**1.5 + x * h, None)
    f = lambda h: KINDS[kind](body, jnp.ones(3), h, **ON)
    number = 0 if mode == "forward over forward" else 2
    direction = "forward" if mode == "forward over forward" else "backward"
    text = f"must stay finite[.] .*Got: .* in step {number}( in lane.*)?, going {direction}"
    fails(text, SECOND[mode](f), 0.0)
    plain = lambda h: KINDS[kind](body, jnp.ones(3), h)
    assert_close(*(jax.jit(SECOND[mode](g))(1.0) for g in (f, plain)))


def lane_loop(n, h, **how):
    """Step 3 divides by zero, and takes the root of that going back."""
    step = lambda c: (c[0] + 1, jnp.sqrt(c[1] * (3.0 - c[0])))
    return loopkit.while_loop(lambda c: c[0] < n, step, (0, h), **ON, **how)[1]


LANES = [{"max_steps": 9}, {"checkpoints": 2}, {"max_steps": 9, "checkpoints": "all"}]
LANES += [{"max_steps": 9, "lanes": "compact"}, {"max_steps": 9, "unroll": 4}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", LANES, ids=str)
def test_lanes_that_stop_apart(how):
    """Those that have stopped take steps that count for nothing, and are no error."""
    h, steps = jnp.ones(4), jnp.array([1, 3, 0, 2])
    grads = jax.vmap(jax.grad(lambda h, n: lane_loop(n, h, **how)))
    wanted = [jax.grad(lambda h, n=n: lane_loop(n, h, **how))(1.0) for n in steps.tolist()]
    assert_close(grads(h, steps), jnp.stack(wanted))
    text = r"the cotangent of `init_val\[1\]` .* in step 3 in lane 1, going"
    fails(text, grads, h, steps + jnp.array([0, 1, 0, 0]))


@pytest.mark.parametrize("how", LANES, ids=str)
def test_the_first_lane_that_fails_is_to_be_run_again(how):
    def f(h, n):
        step = lambda c: (c[0] + 1, c[1] / (3.0 - c[0]))
        return loopkit.while_loop(lambda c: c[0] < n, step, (0, h), **ON, **how)[1]

    text = r"`init_val\[1\]` must stay finite[.] .*Got: inf in step 3 in lanes 1, 3, going"
    h, steps = jnp.array([1.0, 6.0, 3.0, 4.0]), jnp.array([1, 6, 0, 7])
    before = fails(text, jax.vmap(f), h, steps)
    assert_close(before, ((jnp.asarray(3), jnp.asarray(1.0)),))


@pytest.mark.slow
def test_lanes_of_lanes():
    f = jax.vmap(jax.vmap(lambda h, x: loopkit.scan(divided, h, x, **ON)[0]), in_axes=(1, 0))
    xs = jnp.ones((2, 3, 4)).at[1, 2, 3].set(0.0)
    h = jnp.arange(1.0, 7).reshape(3, 2)
    before = fails(r"Got: inf in step 3 in lane \(1, 2\), going forward", f, h, xs)
    assert_close(before, (h[2, 1], jnp.asarray(0.0)))


def test_every_leaf_that_fails_is_named():
    def step(carry, x):
        return {"a": carry["a"] / x, "b": [carry["b"][0] * 0 / x], "n": carry["n"] + 1}, carry["a"]

    init = {"a": jnp.ones(3), "b": [1.0], "n": 0}
    text = r"value of `init\['a'\]`, and `init\['b'\]\[0\]` must stay finite[.] .*Got: inf at index"
    fails(text, lambda xs: loopkit.scan(step, init, xs, **ON), XS)


@pytest.mark.exhaustive
def test_the_body_is_named_and_where_it_is():
    line = root.__code__.co_firstlineno
    text = (
        r"Run that step alone, with jax.debug_nans or in a debugger: `root\(\*loopkit.replay\(\)\)`"
    )
    text += rf". Steps are counted from 0. Got: .*in `f`, which is `root` at .*finite.py:{line}\."
    run = lambda xs: loopkit.scan(root, -1.0, xs, **ON)[0]
    replayed = fails(text, run, XS)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="sqrt"):
        root(*replayed)
    unnamed = lambda xs: loopkit.scan(lambda h, x: (h / x, None), 1.0, xs, **ON)[0]
    fails(
        r"Run .*: `f\(\*loopkit.replay\(\)\)`. .* Got: .* in `f` at .*test_finite.py:\d+",
        unnamed,
        XS,
    )
    f = jax.grad(lambda h: loopkit.scan(root, h, XS, **ON)[0])
    fails(r"debugger: `jax.vjp` of `root` at `loopkit.replay\(\)`", f, 1.0)
    f = lambda h: jax.jvp(lambda h: loopkit.scan(root, h, XS, **ON)[0], (h,), (h,))
    fails(r"debugger: `jax.jvp` of `root` at `loopkit.replay\(\)`", f, 1.0)


def test_a_y():
    f = lambda xs: loopkit.scan(lambda h, x: (h, {"y": 1 / x}), 1.0, xs, **ON)
    fails(r"the value of `ys\['y'\]` must stay finite[.] .*Got: inf in step 2", f, XS)
    # A cotangent from outside is found where it enters.
    f = jax.grad(lambda h: jnp.log(loopkit.scan(lambda h, x: (h, h * x), h, XS, **ON)[1]).sum())
    fails(r"the cotangent of `ys` must stay finite[.] .*Got: inf in step 2, going backward", f, 1.0)


SOME = [
    {"every": 2},
    {"every": 2, "reduce": "mean"},
    {"reduce": "sum"},
    {"reduce": "last"},
    {"out_axes": None},
]


@pytest.mark.parametrize("how", SOME, ids=str)
def test_ys_of_which_some_are_kept(how):
    f = lambda xs: loopkit.scan(lambda h, x: (h * 2, 1 / x), 1.0, xs, **how, **ON)
    xs = jnp.array([1.0, 1.0, 1.0, 0.0])
    replayed = fails(r"the value of `ys`.* must stay finite[.] .*Got: inf.* in step 3", f, xs)
    assert_close(replayed, (jnp.asarray(8.0), jnp.asarray(0.0)))


@pytest.mark.exhaustive
def test_what_is_closed_over():
    def loss(w):
        step = lambda h, x: (h + jnp.where(x > 1, jnp.sqrt(w * x), 0.0).sum(), None)
        return loopkit.scan(step, 0.0, XS, **ON)[0]

    kind = jnp.zeros(3).dtype
    text = (
        rf"cotangent of what `f` closes over \({kind}\[3\]\) must stay finite[.] .* Got: .* step 4"
    )
    fails(text, jax.grad(loss), jnp.zeros(3))
    rows = lambda w: loopkit.fori_loop(0, 4, lambda i, h: h + jnp.sqrt(w[i]), 0.0, **ON)
    text = r"cotangent of what `body_fun` closes over .*, in a row that is read, .* in step 2"
    fails(text, jax.grad(rows), jnp.array([1.0, 2.0, 0.0, 3.0]))


@pytest.mark.slow
def test_a_cotangent_of_xs():
    f = jax.grad(
        lambda xs: loopkit.scan(lambda h, x: (h + jnp.sqrt(x["a"]), None), 0.0, {"a": xs}, **ON)[0]
    )
    fails(
        r"the cotangent of `xs\['a'\]` must stay finite[.] .*Got: inf in step 2, going backward",
        f,
        XS,
    )


@pytest.mark.exhaustive
def test_what_was_not_finite_from_the_start():
    """It may stay so, and is found once it has become worse, or was finite in between."""
    least = lambda xs: loopkit.scan(lambda h, x: (jnp.minimum(h, x), h), jnp.inf, xs, **ON)
    assert_close(least(XS), loopkit.scan(lambda h, x: (jnp.minimum(h, x), h), jnp.inf, XS))
    text = "the value of `init`, and `ys` must stay finite[.] .*Got: nan in step 1"
    fails(
        text,
        lambda xs: loopkit.scan(lambda h, x: (h * x, h * x), jnp.inf, xs, **ON),
        jnp.array([1.0, 0.0]),
    )
    stays = lambda h: loopkit.scan(lambda h, x: (h * x, None), h, XS, **ON)[0]
    assert np.isnan(stays(jnp.nan))
    # A tangent, a cotangent.
    assert np.isnan(jax.jvp(stays, (1.0,), (jnp.nan,))[1])
    assert np.isnan(jax.grad(lambda h: stays(h) * jnp.nan)(1.0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("init", [jnp.inf, jnp.nan])
def test_a_y_of_what_is_passed_on(init):
    """It is no worse than that, which is no output of the check itself."""
    passed = lambda c: loopkit.scan(lambda c, x: (c, c + x), c, XS, **ON)[1]
    for run in (passed, jax.jit(passed), jax.vmap(passed)):
        assert not np.isfinite(run(jnp.full((2,) * (run is not passed), init))).any()
    along = lambda c, t: jax.jvp(passed, (c,), (t,))[1]
    for run in (along, jax.jit(along)):
        assert not np.isfinite(run(1.0, init)).any()
    worse = lambda c: loopkit.scan(lambda c, x: (c, (c - 1) * jnp.inf), c, XS, **ON)[1]
    fails("`ys` must stay finite[.] .*Got: nan in step 0", worse, 1.0)


def test_leaves_of_all_kinds():
    """Integers, keys, static leaves, empty ones; a complex number fails."""

    def step(carry, x):
        key = jax.random.split(carry["key"])[0]
        return carry | {"n": carry["n"] + 1, "key": key, "z": carry["z"] / x.astype(complex)}, None

    init = {"n": 0, "key": jax.random.key(3), "f": jnp.sin, "none": jnp.zeros((0, 2)), "z": 1j}
    replayed = fails(
        r"`init\['z'\]` must stay finite[.] .*Got: nan in step 2",
        lambda xs: loopkit.scan(step, init, xs, **ON)[0]["z"],
        XS,
    )
    carry, x = replayed
    assert carry["f"] is jnp.sin
    assert int(carry["n"]) == 2
    after = step(carry, x)[0]
    assert np.isnan(after["z"])
    key = jax.random.split(jax.random.split(jax.random.key(3))[0])[0]
    assert_close(jax.random.key_data(carry["key"]), jax.random.key_data(key))


@pytest.mark.slow
def test_buffers():
    """The rows that a step writes, and the cotangents of those that it reads."""
    f = lambda b: loopkit.fori_loop(
        0, 5, lambda i, b: b.at[i].set(1 / (3.0 - i)), b, buffers=True, **ON
    )
    i, buffer = fails(
        "the value of `init_val`, in a row that is written, must .* in step 3", f, jnp.zeros(6)
    )
    assert int(i) == 3
    assert isinstance(buffer, jax.ShapeDtypeStruct)
    assert buffer.shape == (6,)
    body = lambda i, b: b.at[i + 1].set(jnp.sqrt(b[i] * (3.0 - i)))
    g = lambda x: loopkit.fori_loop(0, 4, body, jnp.zeros(6).at[0].set(x), buffers=True, **ON)[4]
    fails("the cotangent of `init_val`, in a row that is read, must .* in step 3", jax.grad(g), 1.0)
    array = loopkit.TensorArray.empty(4, jnp.float32(0))
    appended = lambda n: loopkit.fori_loop(0, n, lambda i, c: c.append(1 / (2.0 - i)), array, **ON)
    fails(
        r"`init_val.elements\[0\]`, in a row that is written, must .* in step 2",
        lambda: appended(4),
    )
    assert_close(appended(2).stack()[:2], jnp.float32([0.5, 1.0]))


@pytest.mark.exhaustive
def test_loops_in_loops():
    """The innermost that watches is the one that is named, whichever that is."""

    def nested(outer, inner):
        step = lambda h, _: (loopkit.scan(divided, h, XS, **inner)[0], None)
        return lambda h: loopkit.scan(step, h, None, 3, **outer)[0]

    fails("the value of `init` must stay finite[.] .*Got: inf in step 2", nested(ON, ON), 1.0)
    fails("the value of `init` must stay finite[.] .*Got: inf in step 2", nested({}, ON), 1.0)
    before = fails(
        "the value of `init` must stay finite[.] .*Got: inf in step 0", nested(ON, {}), 1.0
    )
    assert_close(before, (jnp.asarray(1.0), None))


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, ct: (ct / x,))


@pytest.mark.exhaustive
def test_custom_vjp():
    """A body without a JVP has a gradient, and none is traced."""
    f = lambda h: loopkit.scan(lambda h, x: (square(h) * x, None), h, XS, **ON)[0]
    fails("the cotangent of `init` must stay finite[.] .*Got: inf in step 4", jax.grad(f), 1.0)
    fine = lambda h, **how: loopkit.scan(lambda h, x: (square(h) * x, None), h, XS[:2], **how)[0]
    assert_close(jax.grad(lambda h: fine(h, **ON))(2.0), jax.grad(fine)(2.0))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, "all"])
def test_loops_of_lax(checkpoints):
    how = {"checkpoints": checkpoints, "max_steps": 9, **ON}
    scan = loopkit.checkpointed(lambda h: lax.scan(root, h, XS)[0], **how)
    text = r"checkpointed: the cotangent of `carry\[0\]` must stay finite[.] Look at the leaves of "
    text += r"the carry and x before that step: `loopkit.replay\(\)`[.] .* Got: "
    text += r"inf in step 4, going backward, in the scan at .*test_finite.py:\d+ "
    assert_close(fails(text, jax.grad(scan), 1.0), ([jnp.asarray(0.0)], [jnp.asarray(9.0)]))
    loop = lambda h: lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] / (3 - c[0])), (0, h)
    )
    before = fails(
        r"`carry\[1\]` .* in step 3, .* the while_loop at", loopkit.checkpointed(loop, **how), 1.0
    )
    assert int(before[0][0]) == 3
    assert len(before) == 1

    def replaced(h):
        with loopkit.replace_lax_loops(**how):
            return loop(h)[1]

    fails(
        r"replace_lax_loops: the value of `carry\[1\]` must stay finite[.] .*Got: inf in step 3",
        replaced,
        1.0,
    )
    fine = lambda h: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / (3 - c[0])), (0, h)
    )[1]
    assert_close(jax.grad(loopkit.checkpointed(fine, **how))(2.0), jnp.asarray(1 / 6))
    lanes = jax.vmap(
        loopkit.checkpointed(
            lambda n, h: lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] / (3.0 - c[0])), (0, h)
            )[1],
            **how,
        )
    )
    fails(r"in step 3 in lane 1, going", lanes, jnp.array([2, 5, 3]), jnp.ones(3))


@pytest.mark.slow
def test_on_devices():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("a")
    f = jax.shard_map(
        lambda h: loopkit.scan(divided, h, XS, **ON)[0], mesh=mesh, in_specs=spec, out_specs=spec
    )
    fails("Got: inf at index .0. in step 2", f, jnp.ones(2))


@pytest.mark.slow
def test_recomputed_under_jax_checkpoint():
    f = jax.checkpoint(lambda h: loopkit.scan(root, h, XS, **ON)[0])
    fails("the cotangent of `init` must stay finite[.] .*Got: inf in step 4", jax.grad(f), 1.0)


MODES = ["", "f", "r", "fr", "rr"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(PROBLEMS, CHECKPOINTS, of=15))
def test_no_false_alarm(problem, checkpoints):
    """Over the table of loops, in one of which a tangent that nobody reads is a NaN."""
    modes = ["", "r"] if problem.name == "dead_leaf" else MODES[:3]
    watched = problem.flat_loop(checkpoints, **ON)
    for pattern in modes:
        run = jax.jit(derivative(watched, pattern))
        assert_close(run(problem.vector()), expected(problem.name, pattern))


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", named("scan_until", "while_in_scan"), ids=lambda p: p.name)
def test_no_false_alarm_in_second_derivatives(problem):
    for pattern in MODES[3:]:
        run = jax.jit(derivative(problem.flat_loop(3, **ON), pattern))
        assert_close(run(problem.vector()), expected(problem.name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_when_off(kind):
    """Programs and results are the same to the letter, and to the bit, before and after
    watching."""
    texts, values = [], []
    for how in ({}, ON, {"debug": None}):
        f = jax.jit(
            jax.value_and_grad(lambda h, how=how: KINDS[kind](root, XS + 1, h, **how).sum())
        )
        text = f.lower(jnp.ones(2)).as_text()
        texts.append(re.sub(r"loc\(.*\)", "", text))
        values.append(f(jnp.ones(2)))
    assert texts[0] == texts[2]
    assert ["callback" in text for text in texts] == [False, True, False]
    jax.tree.map(np.testing.assert_array_equal, values[0], values[2])


def test_a_watched_constant_is_stored_once():
    w, x = jnp.eye(64) / 2, jnp.ones((3, 64))

    def loss(x, how):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        return loopkit.while_loop(lambda c: c[0] < 30, step, (0, x), max_steps=40, **how)[1].sum()

    plain, watched = (loopkit.explain(jax.grad(loss), x, how)[0].plan.step for how in ({}, ON))
    assert watched.residual_bytes == plain.residual_bytes


CALLS = {
    "scan": lambda **how: loopkit.scan(root, 1.0, XS, **how),
    "while_loop": lambda **how: loopkit.while_loop(lambda h: h > 1, lambda h: h / 2, 9.0, **how),
    "fori_loop": lambda **how: loopkit.fori_loop(0, 3, lambda i, h: h, 1.0, **how),
    "unbounded_scan": lambda **how: loopkit.unbounded_scan(
        root, 1.0, XS, until=lambda h, _: h < 0, **how
    ),
    "ragged_scan": lambda **how: loopkit.ragged_scan(root, 1.0, [XS], **how),
    "checkpointed": lambda **how: loopkit.checkpointed(jnp.sin, **how),
    "replace_lax_loops": lambda **how: loopkit.replace_lax_loops(**how).__enter__(),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", CALLS)
def test_bad_values(name):
    text = rf"loopkit.{name}: `debug` must be None or \"finite\".*[.] Pass .*Got: "
    with pytest.raises(ValueError, match=text + "'nan' of type str"):
        CALLS[name](debug="nan")
    with pytest.raises(TypeError, match=text + "True of type bool"):
        CALLS[name](debug=True)


def test_replay_of_nothing(monkeypatch):
    monkeypatch.setattr("loopkit._arguments.failed_step._last", [])
    with pytest.raises(
        RuntimeError, match=r"loopkit\.replay: a loop with .* must have failed in this process"
    ):
        loopkit.replay()
