"""Gradients on a GPU: what `accelerators.py` counts on paper, timed on a card.

    python benchmarks/run.py --only cards     # on a machine with a GPU

| section | what is compared                                                                  |
| ------- | --------------------------------------------------------------------------------- |
| prices  | what a launch, a wait and a copy to the host take, beside what a plan takes for it |
| loops   | a small step, 1000 times, by each loop, and several steps to a round                |
| buffers | 2000 rows of 8x128, written to the carry                                          |
| host    | checkpoints of 4 MB on the device, on the host and nowhere                         |
| gpt     | 24 layers, 1024 wide, 16 heads, 2 sequences of 2048, bfloat16, by policy and budget |

Where JAX finds no GPU, a section is left out and says so.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import accelerator_programs as programs
import gpt
import layers
from accelerator_programs import Case
from findings import Record, show_bytes, spread
from harness import interleave, measure, ratio, recorded
from loopkit._plans import costs
from report import Report

ROUNDS = 1000
COPIED = 1 << 26
"""Bytes that are copied to the host and back."""
LIMIT = 1.03
"""The most time, relative to that of a policy in the same memory."""


# --- what a plan takes for granted ----------------------------------------------------------------


def _chain(kernels: int, asks: bool) -> Callable[[jax.Array], jax.Array]:
    """Return a loop of so many small kernels a round; `asks`, the host waits before each round."""

    def body(x):
        for _ in range(kernels):
            x = lax.optimization_barrier(jnp.sin(x))
        return x

    if asks:
        small = lambda s: (s[0] < ROUNDS) & (s[1][0] < 2)
        return lambda x: lax.while_loop(small, lambda s: (s[0] + 1, body(s[1])), (0, x))[1]
    return lambda x: lax.fori_loop(0, ROUNDS, lambda _, x: body(x), x)


def _repeated(name: str) -> int:
    """Return the rounds of a loop, or the bytes of a copy."""
    return ROUNDS if "kernels" in name else COPIED


def prices(report: Report, repeats: int) -> None:
    """Nanoseconds of a launch, of a wait, and of a byte to the host and back."""
    device = jax.devices()[0]
    host, here = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for kind in ("pinned_host", "device")
    )
    small, large = jnp.ones(256), jnp.ones(COPIED // 4)
    loops = {f"{k} kernels": _chain(k, asks=False) for k in (1, 4, 16)}
    loops |= {f"{k} kernels, asked": _chain(k, asks=True) for k in (1, 4, 16)}
    calls = {name: partial(jax.jit(loop), small) for name, loop in loops.items()}
    calls["to the host"] = lambda: jax.device_put(large, host)
    away = jax.device_put(large, host)
    calls["back"] = lambda: jax.device_put(away, here)
    seconds = interleave(calls, repeats)
    report.measured(
        [
            Record(
                "prices",
                name,
                seconds=spread(s),
                counts={"ns a round or byte": 1e9 * spread(s).mid / _repeated(name)},
            )
            for name, s in seconds.items()
        ]
    )
    report.note(f"a plan takes {costs.LAUNCH:.0f} ns for a launch, {costs.WAIT:.0f} for a wait")


# --- the programs that are counted ----------------------------------------------------------------


def _timed(report: Report, repeats: int, program: str, cases: Sequence[Case], over: str) -> None:
    results = measure(
        {case.name: case.function for case in cases},
        {case.name: case.arguments for case in cases},
        repeats,
        rtol=1e-2,
    )
    report.measured(recorded(program, results, over))


def loops(report: Report, repeats: int) -> None:
    load = programs.layer()
    unrolled = {n: f for n, f in programs.UNROLLED.items() if n.endswith("unroll=4")}
    cases = programs.of_workload(load, programs.LOOPS | unrolled)
    _timed(report, repeats, "1000 steps of tanh(w @ x), 256 numbers", cases, "lax.scan")


def buffers(report: Report, repeats: int) -> None:
    cases = programs.of_rows((8, 128))
    _timed(report, repeats, "2000 rows of 8x128", cases, "lax, stacked outputs")


def host(report: Report, repeats: int) -> None:
    cases = programs.of_host()
    x = jnp.linspace(0.0, 1.0, 1 << 20).reshape(1024, 1024)
    cases = [Case(case.name, case.function, [x], case.steps) for case in cases]
    _timed(report, repeats, "1000 steps of 4 MB", cases, "default")


# --- layers ---------------------------------------------------------------------------------------


def policies() -> dict[str, Callable]:
    """Policies as MaxText has them: `full`, `minimal`, `save_qkv_proj`, one that offloads; all."""
    made = jax.checkpoint_policies
    return {
        "full": made.nothing_saveable,
        "save_qkv_proj": made.save_only_these_names("qkv"),
        "minimal": made.dots_with_no_batch_dims_saveable,
        "everything": made.everything_saveable,
    }


def offloaded() -> Callable:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[*gpt.NAMES],
        offload_src="device",
        offload_dst="pinned_host",
    )


def layers_of_gpt(report: Report, repeats: int) -> None:
    """Policies of lax, and loopkit in the memory of each."""
    case = gpt.layers_of_gpt()
    runs = {name: layers.by_policy(policy) for name, policy in policies().items()}
    limits = {name: layers.needed(run, case) for name, run in runs.items()}
    runs["names on the host"] = layers.by_policy(offloaded())
    runs["loopkit, names on the host"] = layers.ours(checkpoints=offloaded())
    runs |= {"loopkit, default": layers.ours(), 'loopkit, "all"': layers.ours(checkpoints="all")}
    pairs = {"names on the host": "loopkit, names on the host"}
    for name, limit in limits.items():
        run, memory = layers.within(case, limit)
        if run is None:
            report.note(f"no plan found within {show_bytes(limit)}, of {name}")
            continue
        pairs[name] = f"loopkit, memory={show_bytes(memory)}, of {name}"
        runs[pairs[name]] = run
    functions = {name: layers.gradient(run, case) for name, run in runs.items()}
    results = measure(functions, layers.arguments(case), repeats, rtol=0.1)
    report.measured(recorded("24 layers, bfloat16", results, "full"))
    for policy, mine in pairs.items():
        against = ratio(results[mine].seconds, results[policy].seconds)
        report.target(f"24 layers: {mine} over {policy}", against, LIMIT)


def on_a_card(run: Callable[[Report, int], None]) -> Callable[[Report, int], None]:
    """Return a section that needs a GPU."""

    def section(report: Report, repeats: int) -> None:
        if jax.default_backend() == "gpu":
            run(report, repeats)
        else:
            report.note("JAX finds no GPU")

    return section


SECTIONS: dict[str, tuple[str, Callable[[Report, int], None]]] = {
    "prices": ("What a GPU takes for a launch, a wait and a copy", on_a_card(prices)),
    "loops": ("A small step on a GPU", on_a_card(loops)),
    "buffers": ("Rows in the carry on a GPU", on_a_card(buffers)),
    "host": ("Checkpoints on the host, on a GPU", on_a_card(host)),
    "gpt": ("Layers of a GPT on a GPU", on_a_card(layers_of_gpt)),
}
