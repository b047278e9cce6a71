"""The program of each of the two processes of `test_multihost.py`; it writes its results to a file.

`python spread_programs.py NAME FOLDER --processes N --coordinator HOST:PORT --process-id I`
"""

import argparse
import functools as ft
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import loopkit
import multihost
from two_processes import LONGEST

WIDTH, BATCH, LENGTH = 6, 4, 300
MEMORY = "20 kB"
NUMBERS = np.asarray([2.0, 30.0, 0.5, 7000.0])
STEPS = 60
COUNTS, STARTS = [3, 7], [0.3, 0.7]


def gradient(mesh: Mesh) -> dict:
    """Return the gradient of the model in examples/multihost.py."""
    slope = multihost.slope_on(mesh, memory=MEMORY)
    model = multihost.initial(WIDTH).model
    model = jax.device_put(model, NamedSharding(mesh, P()))
    texts = multihost.divided(multihost.excerpts(0, BATCH, LENGTH), mesh)
    compiled = slope.lower(model, texts).compile()
    loss, grad = compiled(model, texts)
    leaves = {f"leaf {i}": leaf for i, leaf in enumerate(jax.tree.leaves(grad))}
    sums = compiled.as_text().count("all-reduce(") + compiled.as_text().count("all-reduce-start(")
    return {"loss": loss, "all-reduces": sums, **leaves}


def newton(a, total, by, **options):
    """Square roots, found in as many steps as all of them together need; and how many these are.

    A step looks at the others, too: where they are far off, it is shorter.
    """
    error = lambda x: total((x * x / a - 1) ** 2)

    def step(x):
        far = error(x)
        return x - (x - a / x) / 2 / (1 + 0.1 * far / (1 + far))

    if by == "while_loop":
        unfinished = lambda x: error(x) > 1e-9
        x, info = loopkit.while_loop(unfinished, step, a, return_info=True, **options)
        return total(jnp.sin(x)), info.steps
    scan = ft.partial(loopkit.scan, length=STEPS) if by == "scan" else loopkit.unbounded_scan
    x, ys, info = scan(
        lambda x, _: (step(x), jnp.sin(x)),
        a,
        until=lambda x, _: error(x) <= 1e-9,
        return_info=True,
        **options,
    )
    return total(jnp.sin(x)) + total(jnp.sum(ys, 0)), info.steps


LOOPS = {
    "while_loop": ("while_loop", {}),
    "while_loop, bound": ("while_loop", {"max_steps": STEPS, "memory": "1 kB"}),
    "while_loop, 3 checkpoints": ("while_loop", {"checkpoints": 3}),
    "scan until": ("scan", {}),
    "scan until, all": ("scan", {"checkpoints": "all"}),
    "unbounded_scan": ("unbounded_scan", {"segment": 4}),
}
HOW = {
    name: ["outside jit"] if by == "unbounded_scan" else ["shard_map", "jit"]
    for name, (by, _) in LOOPS.items()
}


def predicates(mesh: Mesh) -> dict:
    """Loops that stop by what all devices have, divided by `jax.shard_map` and by JAX itself."""
    a = jax.device_put(NUMBERS, NamedSharding(mesh, P("data")))
    by_hand = lambda values: lax.psum(jnp.sum(values), "data")
    found = {}
    for name, (by, options) in LOOPS.items():
        slope = lambda total, by=by, options=options: jax.value_and_grad(
            lambda a: newton(a, total, by, **options), has_aux=True
        )
        mapped = jax.shard_map(
            slope(by_hand), mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data"))
        )
        divided = slope(lambda values: jnp.sum(values))
        ways = {"shard_map": jax.jit(mapped), "jit": jax.jit(divided), "outside jit": divided}
        for how in HOW[name]:
            (value, steps), grad = ways[how](a)
            whole = multihost_utils.process_allgather(grad, tiled=True)
            found |= {f"{name} {how}": np.asarray([value, *whole]), f"{name} {how} steps": steps}
    return found


def own_steps(mesh: Mesh) -> dict:
    """A loop that takes as many steps on each device as that is told."""

    def gradient(n, x):
        body = lambda c: (c[0] - 1, jnp.sin(c[1]) + c[1] / 2)
        last = lambda x: loopkit.while_loop(lambda c: c[0] > 0, body, (n[0], x[0]))[1]
        return jax.grad(lambda x: lax.psum(last(x), "data"))(x)

    n, x = (multihost.divided(np.asarray(v), mesh) for v in (COUNTS, STARTS))
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    grad = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(n, x)
    return {"gradient": multihost_utils.process_allgather(grad, tiled=True)}


def stuck(mesh: Mesh) -> dict:
    """One of the processes sends heartbeats, and does not come."""
    if jax.process_index() == 1:
        time.sleep(LONGEST)
    with multihost.limited(5, "the sum"):
        numbers = multihost.divided(np.ones(2), mesh)
        return {"sum": jax.block_until_ready(jax.jit(jnp.sum)(numbers))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("gradient", "predicates", "own_steps", "stuck"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.process_id,
        initialization_timeout=120,
        heartbeat_timeout_seconds=30,
        shutdown_timeout_seconds=30,
    )
    found = globals()[args.name](Mesh(np.asarray(jax.devices()), ("data",)))
    np.savez(args.folder / f"{args.name}-{args.process_id}.npz", **found)


if __name__ == "__main__":
    main()
