"""`debug="finite"`: the step that makes a NaN or an infinity, in whatever is computed of a loop."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import loopkit
from derivatives import assert_close
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


@pytest.mark.slow
@pytest.mark.every_case
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


def test_replay_of_nothing(monkeypatch):
    monkeypatch.setattr("loopkit._arguments.failed_step._last", [])
    with pytest.raises(
        RuntimeError, match=r"loopkit\.replay: a loop with .* must have failed in this process"
    ):
        loopkit.replay()
