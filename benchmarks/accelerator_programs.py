"""The programs that are compiled for accelerators: gradients of loops, by lax, equinox, loopkit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import contenders as run
import gpt
import layers
import loopkit
import workloads
from workloads import Run, Workload, grad_of


@dataclass(frozen=True)
class Case:
    """A gradient to compile."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    steps: int
    large: int | None = None
    """Bytes of what no step should copy: the carry, or the buffer in it."""
    shardings: Any = None
    """Where the arguments are, on several devices."""


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# --- loops that carry an array ----------------------------------------------------------------


def layer() -> Workload:
    """1000 steps of `tanh(w @ x)` on 256 numbers."""
    key_w, key_x = jax.random.split(jax.random.key(0))
    w = jax.random.normal(key_w, (256, 256)) / 16
    step = lambda w, x: jnp.tanh(w @ x)
    return Workload("layer", step, w, jax.random.normal(key_x, (256,)), 1000)


def scan(**how: Any) -> Run:
    """Run a loop with `loopkit.scan` and these options."""

    def loop(body, params, init, n, bound):
        return loopkit.scan(lambda x, _: (body(params, x), None), init, None, bound, **how)[0]

    return loop


def while_loop(bounded: bool = True, **how: Any) -> Run:
    """Run a loop with `loopkit.while_loop` and these options, and with `max_steps` if it is
    bounded."""

    def loop(body, params, init, n, bound):
        step = lambda s: (s[0] + 1, body(params, s[1]))
        most = bound if bounded else None
        return loopkit.while_loop(lambda s: s[0] < n, step, (0, init), max_steps=most, **how)[1]

    return loop


LOOPS: dict[str, Run] = {
    "lax.scan": run.lax_scan,
    "two lax scans by hand": run.nested_scans,
    "equinox scan": run.equinox_scan(),
    'equinox scan, "all"': run.equinox_scan("all"),
    "equinox scan, 8": run.equinox_scan(8),
    "equinox while_loop, max_steps": run.equinox_while_loop(),
    "equinox while_loop, max_steps, 8": run.equinox_while_loop(checkpoints=8),
    "loopkit.scan": scan(),
    'loopkit.scan, "all"': scan(checkpoints="all"),
    "loopkit.scan, 8": scan(checkpoints=8),
    "loopkit.while_loop, max_steps": while_loop(),
    "loopkit.while_loop, max_steps, 8": while_loop(checkpoints=8),
    "loopkit.while_loop": while_loop(bounded=False),
}
"""The loops, by name. A name has the number of checkpoints, or `"all"`, if that is not the
default."""

WITHOUT_COUNTS = {name: loop for name, loop in LOOPS.items() if not name.endswith(", 8")}

UNROLLED: dict[str, Run] = {
    f"{name}, unroll={unroll}": make(unroll=unroll)
    for name, make in {
        "loopkit.scan": scan,
        'loopkit.scan, "all"': partial(scan, checkpoints="all"),
        "loopkit.while_loop, max_steps": while_loop,
    }.items()
    for unroll in (1, 4, 16)
}


def of_workload(load: Workload, loops: dict[str, Run] | None = None) -> list[Case]:
    """Return the gradient of a workload by each loop."""
    arguments = workloads.arguments(load, load.steps)
    return [
        Case(name, grad_of(loop, load, load.steps), arguments, load.steps, bytes_of(load.init))
        for name, loop in (loops or LOOPS).items()
    ]


# --- loops that write rows ----------------------------------------------------------------------

ROWS = 2000


def rows_in_carry(loop: Callable[..., Any], x: Any, w: Any) -> Any:
    """2000 rows in the carry, each made of the one before."""

    def body(carry, _):
        i, rows = carry
        return (i + 1, rows.at[i].set(jnp.tanh(w * rows[i - 1]))), None

    rows = jnp.zeros((ROWS, *x.shape)).at[0].set(x)
    return jnp.sum(loop(body, (1, rows), ROWS - 1)[1] ** 2)


def rows_stacked(x: Any, w: Any) -> Any:
    """Compute the rows as outputs of a scan, which stacks them."""

    def body(row, _):
        row = jnp.tanh(w * row)
        return row, row

    return jnp.sum(lax.scan(body, x, None, ROWS - 1)[1] ** 2) + jnp.sum(x**2)


def second(carry: Any) -> Any:
    return carry[1]


def lax_rows(body, init, length):
    return lax.scan(body, init, None, length)[0]


def loopkit_rows(body, init, length, **how):
    return loopkit.scan(body, init, None, length, buffers=second, **how)[0]


def loopkit_rows_while(body, init, length, **how):
    step = lambda carry: body(carry, None)[0]
    how = {"max_steps": length, "buffers": second, **how}
    return loopkit.while_loop(lambda carry: carry[0] <= length, step, init, **how)


def equinox_rows(body, init, length, checkpoints=None):
    how = {"kind": "checkpointed", "checkpoints": checkpoints, "buffers": second}
    return eqxi.scan(body, init, None, length, **how)[0]


BUFFERS: dict[str, Callable[..., Any]] = {
    "lax, stacked outputs": rows_stacked,
    "lax, `.at[i].set` in the carry": partial(rows_in_carry, lax_rows),
    "equinox scan": partial(rows_in_carry, equinox_rows),
    'equinox scan, "all"': partial(rows_in_carry, partial(equinox_rows, checkpoints="all")),
    "loopkit.scan": partial(rows_in_carry, loopkit_rows),
    'loopkit.scan, "all"': partial(rows_in_carry, partial(loopkit_rows, checkpoints="all")),
    "loopkit.while_loop, max_steps": partial(rows_in_carry, loopkit_rows_while),
}


def of_rows(shape: tuple[int, ...]) -> list[Case]:
    """Return the gradient of 2000 rows of a shape, by each loop."""
    arguments = jnp.full(shape, 0.5), jnp.ones(shape)
    large = ROWS * bytes_of(arguments[0])
    return [
        Case(name, jax.grad(f, argnums=(0, 1)), arguments, ROWS - 1, large)
        for name, f in BUFFERS.items()
    ]


# --- beam search --------------------------------------------------------------------------------


def of_decoding() -> list[Case]:
    """Return the gradient of the risk of a beam search, of words of unknown length."""
    import beam_searches as searches  # needs what the examples need

    count, longest = 8, 20
    params, hiddens, _ = searches.words(longest)
    lasts = jnp.full(count, longest, jnp.int32) - jnp.arange(count) % 4
    arguments = params, hiddens[:count], lasts
    loops = {
        "lax.scan of the bound": searches.by_scan,
        "equinox while_loop, max_steps": searches.by_equinox,
        "loopkit.while_loop, max_steps": loopkit.while_loop,
    }
    return [
        Case(
            name,
            searches.slope_of(searches.with_loop(loop, searches.search_of(200))),
            arguments,
            longest,
        )
        for name, loop in loops.items()
    ]


# --- a carry that is kept on the host -------------------------------------------------------------

DEVICE, HOST = "256 MB", "1 GB"


LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def large_carry(x: Any, steps: int = 1000, **how: Any) -> Any:
    """Steps of 4 MB."""
    step = lambda x, _: (x + 1e-3 * jnp.sin(x), None)
    return jnp.sum(loopkit.scan(step, x, None, steps, **how)[0])


def of_host() -> list[Case]:
    """Return the gradient of a loop that keeps its checkpoints on the device, or on the host."""
    ways = {
        f'`memory={{"device": "{DEVICE}", "host": "{HOST}"}}`': {
            "memory": {"device": DEVICE, "host": HOST}
        },
        f'`memory="{DEVICE}"`': {"memory": DEVICE},
        "default": {},
        '`checkpoints="all"`': {"checkpoints": "all"},
    }
    return [
        Case(name, jax.grad(partial(large_carry, **how)), [LARGE], 1000)
        for name, how in ways.items()
    ]


# --- layers ---------------------------------------------------------------------------------------


def policies_of_maxtext() -> dict[str, Callable]:
    """Return what MaxText calls its policies, for the names of `gpt.py`."""
    made = jax.checkpoint_policies
    return {
        "full": made.nothing_saveable,
        "save_qkv_proj": made.save_only_these_names("qkv"),
        "save_dot_except_mlp": made.save_only_these_names("qkv", "attention"),
        "minimal": made.dots_with_no_batch_dims_saveable,
        "minimal_offloaded": made.offload_dot_with_no_batch_dims("device", "pinned_host"),
    }


def of_gpt(devices: Sequence[Any] = ()) -> list[Case]:
    """Return the gradient through layers by each policy, on one device or on several."""
    return [
        _of_layers(name, layers.by_policy(policy), tuple(devices))
        for name, policy in policies_of_maxtext().items()
    ]


def gpt_within(memory: dict[str, int], devices: Sequence[Any] = ()) -> Case:
    """Return the same gradient with loopkit, within a budget for each device."""
    shared = {where: count * max(1, len(devices)) for where, count in memory.items()}
    if not shared["host"]:
        return _of_layers("", layers.ours(memory=shared["device"]), tuple(devices))
    return _of_layers("", layers.ours(memory=shared), tuple(devices))


def _of_layers(name: str, run: Callable[..., Any], devices: Sequence[Any]) -> Case:
    """Return the gradient for a batch that gives each device two sequences."""
    case = gpt.layers_of_gpt(2 * max(1, len(devices)), devices=devices)
    gradient, places = layers.gradient(run, case), None
    if devices:
        whole, places = gradient, gpt.shardings(devices)
        gradient = lambda *given: lax.with_sharding_constraint(whole(*given), places)
    return Case(name, gradient, layers.arguments(case), 24, shardings=places)


# --- several devices ------------------------------------------------------------------------------


def batch_of_rows(scan: Callable[..., Any], w: Any, x: Any, **how: Any) -> Any:
    """Map over rows; all share the weights."""
    return jnp.sum(scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 100, **how)[0] ** 2)


def parts_of_carry(scan: Callable[..., Any], p: Any, x: Any, **how: Any) -> Any:
    """Return a carry of which each device has a part; one number is everybody's."""
    step = lambda x, _: (x + 1e-3 * jnp.sin(p * x), None)
    return jnp.sum(scan(step, x, None, 100, **how)[0] ** 2)


def shardings(case: Case, devices: Sequence[Any]) -> list[NamedSharding]:
    """Put the first argument on each device, and spread the second over them."""
    mesh = Mesh(np.asarray(devices), ("d",))
    return [NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))]


def of_devices() -> list[Case]:
    """Gradients in the parameters and in the carry."""
    number, weights = jax.ShapeDtypeStruct((), jnp.float32), jnp.zeros((128, 128))
    host = {"memory": {"device": "400 kB", "host": "4 MB"}}
    ways = {
        "lax.scan": (lax.scan, {}),
        "two lax scans by hand": (two_scans, {}),
        "loopkit.scan": (loopkit.scan, {}),
        "loopkit.scan, 8": (loopkit.scan, {"checkpoints": 8}),
        'loopkit.scan, "all"': (loopkit.scan, {"checkpoints": "all"}),
        "loopkit.scan, on the host": (loopkit.scan, host),
    }
    return [
        Case(f"{what}, {name}", jax.grad(partial(f, scan, **how), (0, 1)), arguments, 100)
        for what, f, arguments in (
            ("parts of a batch", batch_of_rows, (weights, jnp.zeros((64, 128)))),
            ("parts of a carry", parts_of_carry, (number, jnp.zeros((512, 64)))),
        )
        for name, (scan, how) in ways.items()
    ]


def two_scans(step: Callable[..., Any], x: Any, xs: None, length: int) -> Any:
    """Return a scan of scans of ten steps, each of which is run again."""
    inner = jax.checkpoint(lambda x, _: lax.scan(step, x, None, 10))
    return lax.scan(inner, x, None, length // 10)
