"""Checkpoints on the host, by the account of the compilers for a GPU and a TPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import loopkit
from loopkit import Plan
from loopkit._engine.lowering import memory
from loopkit._engine.primitives import forward_p
from loopkit._jax.primitives import named_results
from loopkit._jaxprs import equations

from .machines import TARGETS, compiled, devices, figures, lowered, meanwhile

pytestmark = pytest.mark.accelerators

SHAPE, STEPS = (512, 512), 256
CARRY = 4 * 512 * 512
DEVICE = 24 * 10**6
TWO = {"memory": {"device": DEVICE, "host": "4 GB"}}
ALL = {"checkpoints": Plan(0, keeps_all=True, store="residuals", host=True)}
FEW = {"checkpoints": Plan(16, segment=4, host=True)}
SEGMENTS = {"checkpoints": Plan(64, segment=4, host=True)}
EVERY = {"checkpoints": Plan(STEPS, host=True)}
X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
LANES = jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32)


def swing(x):
    return jnp.sin(x) * jnp.float32(1.01)


def scan(x, options=TWO):
    return jnp.sum(loopkit.scan(lambda x, _: (swing(x), None), x, None, STEPS, **options)[0] ** 2)


def bounded(x):
    small, step = lambda x: jnp.max(x) < 3, swing
    return jnp.sum(loopkit.while_loop(small, step, x, max_steps=STEPS, **TWO) ** 2)


def unbounded(x):
    return jnp.sum(loopkit.while_loop(lambda x: jnp.max(x) < 3, swing, x, **TWO) ** 2)


def with_options(options):
    return jax.grad(lambda x: scan(x, options))


grad, every = jax.grad(scan), with_options(EVERY)
PROGRAMS = {
    "scan": (grad, X),
    "while loop": (jax.grad(bounded), X),
    "without a bound": (jax.grad(unbounded), X),
    "residuals": (with_options(ALL), X),
    "few": (with_options(FEW), X),
    "every carry": (every, X),
    "in jit": (jax.grad(lambda x: jax.jit(scan)(x)), X),
    "lanes": (jax.vmap(grad), LANES),
    "lanes that stop apart": (jax.vmap(jax.grad(bounded)), LANES),
    "reverse over reverse": (jax.grad(lambda x: jnp.sum(grad(x) ** 2)), X),
    "forward over reverse": (lambda x: jax.jvp(grad, (x,), (x,))[1], X),
    "in lax.scan": (
        jax.grad(lambda x: lax.scan(lambda x, _: (x * scan(x), None), x, None, 3)[0].sum()),
        X,
    ),
    "in loopkit.scan": (
        jax.grad(lambda x: loopkit.scan(lambda x, _: (x * scan(x), None), x, None, 3)[0].sum()),
        X,
    ),
    "gradient in lax.scan": (lambda x: lax.scan(lambda x, _: (grad(x), None), x, None, 3)[0], X),
    "gradient in loopkit.scan": (
        lambda x: loopkit.scan(lambda x, _: (grad(x), None), x, None, 3)[0],
        X,
    ),
    "in a branch": (jax.grad(lambda x: lax.cond(x[0, 0] > 0, scan, jnp.sum, x)), X),
    "in jax.checkpoint": (jax.grad(lambda x: jax.checkpoint(scan)(x) * 2), X),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_device_stays_within_its_budget(name, target):
    """The device holds the budget and one step; each lane and each tangent has its own of both."""
    function, x = PROGRAMS[name]
    found = compiled(target, function, x)
    assert found.device_bytes <= DEVICE + 2 * CARRY
    assert found.host_bytes >= (15 if name == "few" else 100) * CARRY
    assert found.host_bytes <= 8 * (STEPS + 1) * CARRY


SINGLE = {
    "budget": (1, TWO),
    "residuals": (1, ALL),
    "one of many": (9, {"checkpoints": Plan(2, host=True)}),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SINGLE)
def test_a_single_row(name, target):
    """A compiler would take a single row for the array that it is made of, on the device."""
    steps, options = SINGLE[name]
    loop = lambda x: loopkit.scan(lambda x, _: (swing(x), None), x, None, steps, **options)[0]
    assert compiled(target, jax.grad(lambda x: jnp.sum(loop(x))), X).host_bytes >= CARRY


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_thousand_carries_of_four_megabytes(target):
    def loss(x, w):
        step = lambda x, _: (jnp.tanh(x @ w), None)
        memory = {"device": "256 MB", "host": "4 GB"}
        return jnp.sum(loopkit.scan(step, x, None, 1000, memory=memory)[0] ** 2)

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    found = compiled(target, jax.grad(loss, (0, 1)), x, x)
    assert found.device_bytes <= 256 * 10**6
    assert found.host_bytes == 100 * 4 * 2**20


@pytest.mark.parametrize("target", TARGETS)
def test_out_of_a_program(target):
    """A program returns on the host what it saves for another."""
    place = SingleDeviceSharding(devices(target)[0])
    forward = jax.jit(lambda x: jax.vjp(scan, x)[1], in_shardings=place)
    memory = forward.lower(X).compile().memory_analysis()
    assert memory.host_output_size_in_bytes == STEPS * CARRY
    assert memory.temp_size_in_bytes <= 3 * CARRY


@pytest.mark.parametrize("target", TARGETS)
def test_outside_jit(target):
    """The program that a loop is compiled to by itself."""
    traced = jax.make_jaxpr(lambda x: jax.vjp(scan, x)[1])(X)
    eqns = equations.all_equations(traced)
    params = next(eqn.params for eqn in eqns if eqn.primitive is forward_p)
    place = SingleDeviceSharding(devices(target)[0])
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=place)
    program = named_results.lower(forward_p, tuple(params.items()), x).compile()
    memory = program.memory_analysis()
    assert memory.host_output_size_in_bytes == STEPS * CARRY
    assert memory.temp_size_in_bytes <= 3 * CARRY


LAID_OUT = {
    "shard_map": lambda mesh: jax.shard_map(every, mesh=mesh, in_specs=P("d"), out_specs=P("d")),
    "around shard_map": lambda mesh: jax.grad(
        lambda x: jax.shard_map(
            lambda x: scan(x, EVERY).reshape(1), mesh=mesh, in_specs=P("d"), out_specs=P("d")
        )(x).sum()
    ),
    "by the compiler": lambda mesh: every,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAID_OUT)
def test_several_devices(name, target):
    mesh = Mesh(np.array(devices(target)[:2]), ("d",))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    function = jax.jit(LAID_OUT[name](mesh), in_shardings=NamedSharding(mesh, P("d")))
    if name == "by the compiler" and jax.__version_info__ < (0, 12):
        with pytest.raises(NotImplementedError, match=r"need jax 0\.12 .* divides .*Got: jax"):
            function.lower(x)
        return
    found = figures(function.lower(x).compile())
    assert found.device_bytes <= DEVICE
    assert found.host_bytes == STEPS * CARRY


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_step_puts_on_the_host_itself(target):
    """JAX drops memory spaces inside a primitive that it does not look into."""

    def step(x, _):
        kept = jax.device_put(jnp.cos(x), jax.memory.Space.Host)
        return swing(x), kept

    def rows(x):
        _, ys = lax.scan(step, x, None, 3)
        return loopkit.scan(
            lambda x, y: (x * jax.device_put(y, jax.memory.Space.Device), None), x, ys
        )[0]

    inside = lambda x: loopkit.scan(lambda x, _: (rows(x), None), x, None, 4)[0]
    assert compiled(target, inside, X).host_bytes >= 3 * CARRY


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_noticed_where_nothing_is_put_there(target):
    """The first loop of a process compiles a small one, which shows it."""
    device = devices(target)[0]
    memory.check_placed("scan", device, memory.compiled(device, host=True))
    nothing = memory.compiled(device, host=False)
    with pytest.raises(
        RuntimeError, match=r"scan: the compiler must put .* Got: 0 bytes there, by its"
    ):
        memory.check_placed("scan", device, nothing)


@pytest.mark.parametrize("target", TARGETS)
def test_copies_of_segments_are_made_while_others_run(target):
    """Copies of a segment's first carry, and of the next one's, run while a segment runs or is
    reversed."""
    there, back = meanwhile(compiled(target, with_options(SEGMENTS), X).text)
    assert "while" in there
    assert back.count("while") == 2


@pytest.mark.parametrize("target", TARGETS)
def test_copies_of_steps_are_made_while_others_run(target):
    """On a TPU those that are read: what is saved is copied in one kernel with the step."""
    copies = meanwhile(compiled(target, with_options(EVERY), X).text)
    assert len(copies) == 2
    assert sum(map(bool, copies)) >= {"gpu": 2, "tpu": 1}[target]


ROOM = 100_000


def to_the_end(x, n, outer=None):
    def loop(x):
        below, step = lambda c: c[0] < n, lambda c: (c[0] + 1, swing(c[1]))
        how = {"max_steps": ROOM, "checkpoints": "all"}
        return loopkit.while_loop(below, step, (0, x), **how)[1]

    if outer is None:
        return jnp.sum(loop(x))
    return jnp.sum(loopkit.scan(lambda x, _: (loop(x), None), x, None, outer)[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("outer", [None, 5])
def test_room_for_the_bound_is_not_filled(outer, target):
    types = jax.ShapeDtypeStruct((512,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    found = compiled(target, jax.grad(lambda x, n: to_the_end(x, n, outer)), *types)
    assert found.device_bytes >= ROOM * 512 * 4
    large = [line for line in found.text.splitlines() if re.search(rf"= f32\[{ROOM},", line)]
    assert any('custom_call_target="AllocateBuffer"' in line for line in large)
    assert not [line for line in large if " broadcast(" in line or " copy(" in line]


def test_a_program_for_several_platforms_says_what_each_keeps():
    """It need not be run on the machine that lowers it."""
    text = lowered("gpu", grad, X).as_text()
    assert text.count("annotate_device_placement") >= 2
