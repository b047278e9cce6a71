"""Policies of `jax.checkpoint` in `checkpoints`: what is kept of a step, and the same numbers."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.ad_checkpoint import checkpoint_name

import loopkit
from derivatives import assert_close, orders
from loopkit import _jax
from turns import in_turn

POLICIES = jax.checkpoint_policies
STEPS = 5


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def block(h, p):
    """A layer of a transformer, for one head."""
    centred = h - h.mean(-1, keepdims=True)
    x = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    scores = (x @ p["q"]) @ (x @ p["k"]).T
    mixed = jax.nn.softmax(scores, axis=-1) @ (x @ p["v"])
    h = h + checkpoint_name(mixed, "mixed")
    return h + checkpoint_name(jnp.tanh(h @ p["up"]) @ p["down"], "mlp"), h.sum()


def recurrent(h, x):
    """A gated recurrent unit, whose weights are constants."""
    update, reset = jax.nn.sigmoid(x + h @ WEIGHTS[0]), jax.nn.sigmoid(x + h @ WEIGHTS[1])
    proposed = checkpoint_name(jnp.tanh(x + (reset * h) @ WEIGHTS[2]), "proposed")
    return update * h + (1 - update) * proposed, proposed


WEIGHTS = normal(2, 3, 4, 4)
SIZES = {"q": (4, 4), "k": (4, 4), "v": (4, 4), "up": (4, 8), "down": (8, 4)}
LAYERS = {k: normal(i, STEPS, *size) / 2 for i, (k, size) in enumerate(SIZES.items())}
PROGRAMS = {
    "block": (block, normal(7, 3, 4), LAYERS, ("mixed", "mlp")),
    "recurrent": (recurrent, normal(8, 2, 4), normal(9, STEPS, 2, 4), ("proposed",)),
}
MADE = {
    "nothing": lambda names: POLICIES.nothing_saveable,
    "everything": lambda names: POLICIES.everything_saveable,
    "dots": lambda names: POLICIES.dots_saveable,
    "names": lambda names: POLICIES.save_only_these_names(*names),
    "dots and names": lambda names: POLICIES.save_from_both_policies(
        POLICIES.dots_saveable, POLICIES.save_only_these_names(*names)
    ),
    "exponentials": lambda names: lambda prim, *_, **__: prim.name in ("exp", "tanh", "logistic"),
}
CASES = [(program, policy) for program in PROGRAMS for policy in MADE]


def scans(program, policy):
    """Return one loop by loopkit and by lax, and its operands."""
    step, init, xs, names = PROGRAMS[program]
    saves = MADE[policy](names)
    ours = lambda init, xs: loopkit.scan(step, init, xs, checkpoints=saves)
    wrapped = jax.checkpoint(step, policy=saves, prevent_cse=False)
    return ours, lambda init, xs: lax.scan(wrapped, init, xs), (init, xs)


def stacked(loop, operands):
    """Return the shapes and types that a loop keeps of every step, except those it was given."""
    found = saved_residuals(loop, *operands)
    ours = [aval for aval, where in found if "argument" not in where and "constant" not in where]
    rows = [t for t in ours if t.shape[:1] == (STEPS,)]
    return sorted((t.shape, t.dtype.name) for t in rows)


@pytest.mark.parametrize(("program", "policy"), [c for c in CASES if c[1] != "everything"])
def test_as_much_is_kept_as_in_lax(program, policy):
    ours, theirs, operands = scans(program, policy)
    assert stacked(ours, operands) == stacked(theirs, operands)


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_that_is_read_is_kept_if_everything_may_be(program):
    """Not what depends on constants alone, which lax computes once, too."""
    ours, theirs, operands = scans(program, "everything")
    size = lambda loop: sum(int(np.prod(shape)) for shape, _ in stacked(loop, operands))
    assert stacked(scans(program, "nothing")[0], operands) != stacked(ours, operands)
    assert size(ours) <= size(theirs)


def flat(loop, operands):
    """The loop as a function of a vector, which `derivative` takes."""
    vector, tree = jax.flatten_util.ravel_pytree(operands)
    results = lambda v: jax.flatten_util.ravel_pytree(loop(*tree(v)))[0]
    return results, vector


COMPARED = [("recurrent", policy) for policy in ("exponentials", "dots and names", "nothing")]
SECOND = ["fr", "rf", "rr"]


@pytest.mark.parametrize(
    ("case", "second"),
    [
        *in_turn(COMPARED, SECOND, of=3),
        *(
            pytest.param(("block", policy), way, marks=pytest.mark.slow)
            for policy in ("nothing", "exponentials")
            for way in SECOND
        ),
    ],
)
def test_numbers_are_those_of_lax(case, second):
    """In the value, first derivatives and a second one, as one program."""
    ours, theirs, operands = scans(*case)
    (ours, vector), (theirs, _) = flat(ours, operands), flat(theirs, operands)
    got, expected = (jax.jit(lambda x, f=f: orders(f, x, second))(vector) for f in (ours, theirs))
    assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [400, 900, "1 MB"])
@pytest.mark.parametrize("policy", ["dots", "names"])
def test_a_budget_beside_a_policy(policy, memory):
    step, init, xs, names = PROGRAMS["recurrent"]
    saves = MADE[policy](names)
    loop = lambda init, xs: loopkit.scan(step, init, xs, checkpoints=saves, memory=memory)
    gradient = lambda f: jax.grad(lambda *of: sum(map(jnp.sum, f(*of))), (0, 1))(init, xs)
    assert_close(gradient(loop), gradient(lambda *of: lax.scan(step, *of)))


def test_a_budget_says_how_much_of_what_may_be_kept_is_kept():
    wide = {k: jnp.ones((STEPS, *(64 * n for n in size))) for k, size in SIZES.items()}

    def kept(memory):
        loop = lambda h, p: loopkit.scan(
            block, h, p, checkpoints=POLICIES.dots_saveable, memory=memory
        )
        plan = loopkit.explain(loop, jnp.ones((32, 256)), wide).plan
        assert plan.peak_bytes <= memory
        return plan

    plans = [kept(memory) for memory in (300_000, 600_000, 1_000_000, 2_000_000, 10**8)]
    times = [plan.nanoseconds(STEPS) for plan in plans]
    assert times == sorted(times, reverse=True)
    assert len({plan.peak_bytes for plan in plans}) >= 3


@pytest.mark.slow
def test_of_a_while_loop():
    def loop(x):
        body = lambda x: jnp.sin(x) * checkpoint_name(jnp.exp(-x * x), "bell") + 0.3
        named = POLICIES.save_only_these_names("bell")
        options = {"max_steps": 9, "checkpoints": named}
        return loopkit.while_loop(lambda x: x.sum() < 3.0, body, x, **options)

    def unrolled(x):
        for _ in range(9):
            x = jnp.where(x.sum() < 3.0, jnp.sin(x) * jnp.exp(-x * x) + 0.3, x)
        return x

    x = normal(4, 3)
    assert_close(jax.jacrev(loop)(x), jax.jacrev(unrolled)(x))
    assert_close(jax.vmap(jax.jacrev(loop))(x[None]), jax.vmap(jax.jacrev(unrolled))(x[None]))


@pytest.mark.slow
def test_loops_that_one_cannot_edit():
    step, init, xs, names = PROGRAMS["recurrent"]
    plain = lambda init: lax.scan(step, init, xs)[0].sum()
    saves = MADE["names"](names)
    ours = loopkit.checkpointed(plain, checkpoints=saves)
    assert_close(jax.grad(ours)(init), jax.grad(plain)(init))
    kept = stacked(lambda init: loopkit.checkpointed(plain, checkpoints=saves)(init), (init,))
    assert ((STEPS, 2, 4), "float64") in kept
    assert len(kept) == 2  # the name, and the carry


@pytest.mark.slow
def test_values_on_the_host():
    step, init, xs, _ = PROGRAMS["block"]
    saves = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["mlp"],
        names_which_can_be_offloaded=["mixed"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    loop = lambda init, xs: loopkit.scan(step, init, xs, checkpoints=saves)
    gradient = lambda f: jax.grad(lambda *of: sum(map(jnp.sum, f(*of))), (0, 1))(init, xs)
    assert_close(gradient(loop), gradient(lambda *of: lax.scan(step, *of)))
    plan = loopkit.explain(loop, init, xs).plan
    assert plan.host_bytes == STEPS * 3 * 4 * 8
    found = [aval for aval, _ in saved_residuals(loop, init, xs)]
    assert [t.shape for t in found if _jax.is_on_host(t)] == [(STEPS, 3, 4)]


def gradient_with(**options):
    step, init, xs, _ = PROGRAMS["block"]
    return jax.grad(lambda h: loopkit.scan(step, h, xs, **options)[0].sum())(init)


@pytest.mark.slow
def test_names_that_are_not_there():
    saves = POLICIES.save_only_these_names("mixed", "attention")
    text = (
        r"scan: `checkpoints` must be a policy whose names occur in the step\. Mark values .* Got: "
    )
    with pytest.raises(ValueError, match=text + "'attention' for a step with 'mixed', 'mlp'"):
        gradient_with(checkpoints=saves)
    both = POLICIES.save_from_both_policies(POLICIES.dots_saveable, saves)
    with pytest.raises(ValueError, match="Got: 'attention'"):
        gradient_with(checkpoints=both)
    gradient_with(checkpoints=lambda prim, *_, **of: of.get("name") in ("mixed", "attention"))
    plain = lambda x: loopkit.scan(lambda x, _: (x * x, None), x, None, 3, checkpoints=saves)[0]
    with pytest.raises(ValueError, match=text + "'attention', 'mixed' for a step with no names"):
        jax.grad(plain)(1.0)


def test_what_is_no_policy():
    with pytest.raises(TypeError, match=r"`checkpoints` must be a policy.*Got: 3 for"):
        gradient_with(checkpoints=lambda *_, **__: 3)
    with pytest.raises(TypeError, match=r"`checkpoints` must be a policy.*Got: .*unexpected keyw"):
        gradient_with(checkpoints=lambda *_: True)
    with pytest.raises(TypeError, match=r"a policy of jax\.checkpoint or a Plan[.] .*Got: 1\.5"):
        gradient_with(checkpoints=1.5)


def test_a_policy_that_offloads_within_a_budget():
    saves = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    with pytest.raises(
        ValueError, match=r"`checkpoints` cannot be a policy that puts .* with `memory`"
    ):
        gradient_with(checkpoints=saves, memory="1 MB")


def test_a_policy_without_a_bound():
    saves = POLICIES.dots_saveable
    loop = lambda x: loopkit.while_loop(lambda x: x < 3, lambda x: x + x, x, checkpoints=saves)
    text = 'can be "all" or a policy only if.*Got: checkpoints=the policy `'
    text += "(dots_saveable|DotsSaveable)"
    with pytest.raises(ValueError, match=text):
        jax.grad(loop)(1.0)


@jax.jit
def hidden(x):
    return checkpoint_name(jnp.sin(x) ** 2, "wave")


def test_names_within_jitted_functions():
    saves = POLICIES.save_only_these_names("wave")
    step = lambda x, _: (hidden(hidden(x) + x), None)
    ours = lambda x: loopkit.scan(step, x, None, STEPS, checkpoints=saves)[0]
    x = normal(3, 6)
    theirs = lambda x: lax.scan(
        jax.checkpoint(step, policy=saves, prevent_cse=False), x, None, STEPS
    )[0]
    assert stacked(ours, (x,)) == stacked(theirs, (x,))
    assert_close(jax.jacrev(ours)(x), jax.jacrev(theirs)(x))


def test_the_same_policy_is_compiled_once(compilations):
    """A policy that is written within a call is another object each time."""
    step = lambda c, _: (checkpoint_name(jnp.sin(c), "wave") * 1.1, None)

    def slope(*names):
        saves = POLICIES.save_only_these_names(*names)
        loss = lambda c: loopkit.scan(step, c, None, STEPS, checkpoints=saves)[0]
        return float(jax.grad(loss)(1.0))

    first = slope("wave")
    compilations.clear()
    assert slope("wave") == first
    assert not compilations
    with pytest.raises(ValueError, match="Got: 'other'"):
        slope("other")
