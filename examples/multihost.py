"""One model trained by two processes, as by two machines, each within its own budget of memory.

A recurrent network learns to predict English text, the reference pages that come with Python, byte
by byte. The program divides a batch over the processes. Each process runs loopkit's scan over its
own sequences, and JAX adds up the gradients. Processes find each other through `jax.distributed`.
Every few steps the program saves the model with orbax, and after an interruption it goes on from
there. If one of the processes ends, the others end, too, with an error.

Run `python examples/multihost.py`: it starts both processes on this machine, on its CPU, and takes
a minute. It needs matplotlib, optax, orbax-checkpoint and tqdm, and draws the losses and the memory
in multihost.png. On machines of your own, start on each

    python multihost.py --coordinator HOST:PORT --processes N --process-id I --checkpoints FOLDER

where HOST is the machine of process 0, PORT is free there, and FOLDER is the same for all of them.
"""

import argparse
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8
from tqdm import tqdm

import loopkit
from comparison import compare
from language.model import Reader

Texts = UInt8[Array, "batch length+1"]
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


class State(NamedTuple):
    """The state that is saved; it is the same on all devices."""

    model: Reader
    optimiser: optax.OptState


def initial(width: int) -> State:
    model = Reader(width, key=jax.random.key(0))
    return State(model, OPTIMISER.init(model))


def bits_per_byte(model: Reader, texts: Texts, **options) -> Float[Array, ""]:
    """One loop for all sequences that a device has, so that they share one budget."""

    def read(states: list, pair: tuple) -> tuple[list, Float[Array, ""]]:
        seen, following = pair
        x, new = jax.vmap(model.embedding)(seen), []
        for cell, state in zip(model.cells, states, strict=True):
            x = jax.vmap(cell)(x, state)
            new.append(x)
        logits = jax.vmap(model.readout)(x)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, following)
        return new, nats

    states = [jnp.zeros((len(texts), cell.hidden_size)) for cell in model.cells]
    pairs = texts[:, :-1].T, texts[:, 1:].T
    _, nats = loopkit.scan(read, states, pairs, reduce="mean", **options)
    return jnp.mean(nats) / jnp.log(2.0)


def slope_on(mesh: Mesh, **options) -> Callable:
    """Loss and gradient of a batch whose rows are divided over the devices of a mesh.

    Each device has a model of its own to JAX, from before the loop on. Where that is left to the
    steps, the gradients of all devices are added up in every step, not once behind the loop.
    """

    def loss(model: Reader, texts: Texts) -> Float[Array, ""]:
        model = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), model)
        return jax.lax.pmean(bits_per_byte(model, texts, **options), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(jax.value_and_grad(loss), mesh=mesh, **specs))


@jax.jit
def improved(state: State, gradient: Reader) -> State:
    updates, optimiser = OPTIMISER.update(gradient, state.optimiser)
    return State(optax.apply_updates(state.model, updates), optimiser)


def excerpts(step: int, batch: int, length: int) -> UInt8[np.ndarray, "batch length+1"]:
    """Return the batch of a step, whoever asks: random stretches of Python's reference pages."""
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    starts = np.random.default_rng(step).integers(len(text) - length, size=batch)
    return np.stack([text[start : start + length + 1] for start in starts])


def divided(texts: np.ndarray, mesh: Mesh) -> Texts:
    """Return an array over all processes, of which each is asked for the rows of its own
    devices."""
    sharding = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(texts.shape, sharding, lambda index: texts[index])


def newest(manager: ocp.CheckpointManager, state: State) -> tuple[int, State]:
    """Return the number of steps taken and the newest saved state; `state` says where its arrays
    go."""
    step = manager.latest_step()
    if step is None:
        return 0, state
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return step, manager.restore(step, args=ocp.args.StandardRestore(like))


def apart(one: Reader, other: Reader) -> float:
    """Return the largest difference, relative to the largest number of a leaf."""
    gaps = jax.tree.map(lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(b)), one, other)
    return max(map(float, jax.tree.leaves(gaps)))


def alone(model: Reader, texts: np.ndarray, **options) -> Reader:
    """Return the gradient of a whole batch, by this process without the others."""
    here = jax.tree.map(lambda leaf: leaf.addressable_data(0), model)
    loss = lambda model, texts: bits_per_byte(model, texts, **options)
    return jax.jit(jax.grad(loss))(here, texts)


def inspect(
    slope: Callable, mesh: Mesh, state: State, texts: np.ndarray, memory: str
) -> dict[str, float]:
    """Says whether the gradient is right and what it costs; returns the MB that it needs.

    Every process has to come here.
    """
    rows, first = divided(texts, mesh), jax.process_index() == 0
    slopes = {
        f"memory={memory!r}": slope,
        "every step stored, as by lax.scan": slope_on(mesh, checkpoints="all"),
    }
    if first:
        say(f"gradient through {texts.shape[1] - 1:,} steps, and its memory on each device:")
    with redirect_stdout(sys.stdout if first else io.StringIO()):
        costs = compare(slopes, state.model, rows, repeats=3)
    gradient = jax.tree.map(lambda leaf: leaf.addressable_data(0), slope(state.model, rows)[1])
    gap = apart(gradient, alone(state.model, texts, memory=memory))
    if first:
        say(f"differs by {gap:.1e} from the gradient that one process computes by itself")
    return {name: cost.bytes / 1e6 for name, cost in costs.items() if cost.bytes is not None}


def draw(path: Path, start: int, losses: list[float], needs: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(np.arange(start, start + len(losses)) + 1, losses, ".-")
    left.set(xlabel="step", ylabel="bits a byte", title="a batch, divided over all devices")
    right.bar_label(right.barh(list(needs), list(needs.values())), fmt="%.1f MB", padding=3)
    right.set(xlabel="MB", title="memory of a gradient, on each device")
    right.margins(x=0.2)
    right.invert_yaxis()
    figure.savefig(path, dpi=150)


def train(args: argparse.Namespace) -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    same = NamedSharding(mesh, P())
    state = jax.jit(initial, static_argnums=0, out_shardings=same)(args.width)
    slope = slope_on(mesh, memory=args.memory)
    first = jax.process_index() == 0
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=args.save_every)
    with ocp.CheckpointManager(args.checkpoints.absolute(), options=options) as manager:
        start, state = newest(manager, state)
        say(f"{jax.local_device_count()} of {jax.device_count()} devices; begins at step {start}")
        needs: dict[str, float] = {}
        if args.inspect:
            texts = excerpts(start, args.batch, args.length)
            with limited(args.patience, "the first gradient"):
                needs = inspect(slope, mesh, state, texts, args.memory)
        losses = []
        bar = tqdm(range(start, args.steps), initial=start, total=args.steps, disable=not first)
        for step in bar:
            with limited(args.patience, f"step {step + 1}"):
                texts = divided(excerpts(step, args.batch, args.length), mesh)
                loss, gradient = slope(state.model, texts)
                state = improved(state, gradient)
                losses.append(float(loss))
                bar.set_postfix(bits=f"{losses[-1]:.3f}")
                last = step + 1 == args.steps
                manager.save(step + 1, args=ocp.args.StandardSave(state), force=last)
        with limited(args.patience, "saving"):
            manager.wait_until_finished()
        if first:
            draw(args.plot, start, losses, needs)
            say(f"drawn in {args.plot}")


def say(line: str) -> None:
    print(f"[process {jax.process_index()}] {line}\n", end="", flush=True)


def leave(why: str) -> None:
    """Ends this process at once: at its exit, JAX would wait for the processes that are gone."""
    print(f"[process {jax.process_index()}] {why}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Leaves where something takes longer.

    A process that ended is missed by JAX; one that is there and does not go on is waited for.
    """
    late = threading.Timer(seconds, leave, [f"{what} took more than {seconds:g} s: gave up"])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def work(args: argparse.Namespace) -> None:
    """Do the work of one process."""
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.process_id,
        initialization_timeout=int(args.patience),
        heartbeat_timeout_seconds=args.heartbeat,
    )
    try:
        train(args)
    except Exception:
        traceback.print_exc()
        leave(
            "stopped by the error above. Start all processes again: they go on from what is saved"
        )


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def launch(args: argparse.Namespace, argv: list[str]) -> int:
    """Starts all processes on this machine. Returns the first status of theirs that is an error."""
    command = [sys.executable, __file__, *argv, "--coordinator", f"127.0.0.1:{free_port()}"]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}  # an accelerator serves one process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    workers = []
    try:
        for i in range(args.processes):
            workers.append(subprocess.Popen([*command, "--process-id", str(i)], env=environment))
        return watched(workers, args.heartbeat + args.patience)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def watched(workers: list[subprocess.Popen], patience: float) -> int:
    """Waits for all; once one has failed, for the others no longer than `patience`."""
    failed, until = 0, float("inf")
    running = dict(enumerate(workers))
    while running and time.monotonic() < until:
        time.sleep(0.1)
        for i in [i for i, worker in running.items() if worker.poll() is not None]:
            status = running.pop(i).returncode
            print(f"process {i} has ended with status {status}", flush=True)
            if status and not failed:
                failed, until = status, time.monotonic() + patience
    return failed


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", type=int, default=2)
    add("--process-id", type=int, help="which of them this is; without it, all are started here")
    add("--coordinator", help="host and port of process 0")
    add("--checkpoints", type=Path, default=Path("multihost_checkpoints"), help="a shared folder")
    add("--save-every", type=int, default=5, help="steps")
    add("--steps", type=int, default=20, help="of training, those before a checkpoint included")
    add("--length", type=int, default=4096, help="bytes of a sequence")
    add("--batch", type=int, default=8, help="sequences, divided over all devices")
    add("--width", type=int, default=64)
    add("--memory", default="1 MB", help="for the loop's gradient, on each device")
    add("--inspect", action=argparse.BooleanOptionalAction, default=True)
    add("--plot", type=Path, default=Path("multihost.png"))
    add("--heartbeat", type=int, default=20, help="seconds after which a silent process is dead")
    add("--patience", type=float, default=300, help="seconds for a step, compilation included")
    args = parser.parse_args(argv)
    if args.process_id is None:
        sys.exit(launch(args, argv))
    work(args)


if __name__ == "__main__":
    main()
