"""Timing for machines that are noisy: what is compared runs side by side.

All contenders are compiled before the first is timed. Then come rounds; in each, every contender
runs once, so that a slow spell of the machine falls on all of them alike. The order differs from
round to round, because what frees much memory slows down the call after it. Times are medians over
the rounds. A ratio is the median of the ratios within the rounds: it never divides a quiet moment
of one by a busy moment of the other. Its quartiles are printed beside it.
"""

import gc
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox
import jax
import numpy as np

import loopkit
from findings import Record, Spread, spread, table, table_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from environment import kept_memory, restart_with

watch: Callable[[str, str, float], None] = lambda name, does, done: None
"""Told which contender is next and what it does, and which part of its measurement is done."""
clock = time.perf_counter  # time.process_time, of all cores together, where others use them too
SETTLING_SECONDS = 0.3  # for some tens of ms after compilation, calls are slower
MIN_SAMPLE_SECONDS = 1e-3  # shorter calls are repeated within a sample until it takes this long


class Measurement(NamedTuple):
    name: str
    seconds: Sequence[float]  # of one call, one entry a round
    compile_seconds: float  # tracing, lowering and compiling
    temp_bytes: int | None  # None where the compiler does not say


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Median and quartiles of `over / under`, round by round."""
    return spread(a / b for a, b in zip(over, under, strict=True))


def temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _sample(call: Callable[[], Any], number: int) -> float:
    start = clock()
    for _ in range(number):
        result = call()
    jax.block_until_ready(result)
    return (clock() - start) / number


def interleave(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of one call of each, one entry a round, the calls of a round in any order."""
    numbers = {}
    for name, call in calls.items():
        watch(str(name), "warming up", 0)
        jax.block_until_ready(call())
        numbers[name] = max(1, round(MIN_SAMPLE_SECONDS / max(_sample(call, 1), 1e-9)))
    settled = clock() + SETTLING_SECONDS
    while clock() < settled:
        for call in calls.values():
            jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            watch(str(name), "timing", 1 / repeats)
            seconds[name].append(_sample(calls[name], numbers[name]))
    return seconds


def measure(
    functions: Mapping[str, Callable[..., Any]],
    arguments: Mapping[str, Sequence[Any]] | Sequence[Any],
    repeats: int,
    *,
    rtol: float = 1e-3,
    afresh: bool = False,
) -> dict[str, Measurement]:
    """Compiles every function, checks that all agree with the first, then times them interleaved.

    Functions that are compiled to the same code share their times. `arguments` is one tuple for
    all, or a tuple for each name; `afresh`, with empty caches each.
    """

    def args_of(name):
        return arguments[name] if isinstance(arguments, Mapping) else arguments

    compiled, compile_seconds = {}, {}
    for name, function in functions.items():
        watch(name, "compiling", 0)
        if afresh:
            jax.clear_caches()
        start = clock()
        compiled[name] = jax.jit(function).lower(*args_of(name)).compile()
        compile_seconds[name] = clock() - start
    calls = {name: (lambda c=c, n=name: c(*args_of(n))) for name, c in compiled.items()}

    reference_name = next(iter(calls))
    reference = jax.tree.leaves(calls[reference_name]())
    for name, call in calls.items():
        for want, got in zip(reference, jax.tree.leaves(call()), strict=True):
            scale = float(np.max(np.abs(want))) + 1e-30
            error = float(np.max(np.abs(np.asarray(want) - np.asarray(got)))) / scale
            if not error <= rtol:
                raise AssertionError(f"{name} differs from {reference_name} by {error:.1e}")

    codes = {name: (_code(c), id(args_of(name))) for name, c in compiled.items()}
    timed = {codes[name]: name for name in reversed(codes)}
    seconds = interleave({name: calls[name] for name in calls if name in timed.values()}, repeats)
    return {
        name: Measurement(
            *(name, seconds[timed[codes[name]]], compile_seconds[name], temp_bytes(compiled[name]))
        )
        for name in calls
    }


def _code(compiled: Any) -> str:
    """Return the code of a compiled function, without its name and those of its lines."""
    return re.sub(r"^HloModule.*|, metadata=\{[^}]*\}", "", compiled.as_text(), flags=re.M)


def compile_times(
    functions: Mapping[str, Callable[..., Any]], arguments: Sequence[Any], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds to trace, to lower and to compile each function, interleaved.

    JAX's caches are cleared before each.
    """
    parts = ("trace", "lower", "compile", "total")
    seconds = {name: {part: [] for part in parts} for name in functions}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            watch(name, "tracing and compiling", 1 / (repeats + 1))
            jax.clear_caches()
            gc.collect()
            start = time.perf_counter()
            traced = jax.jit(function).trace(*arguments)
            after_trace = time.perf_counter()
            lowered = traced.lower()
            after_lower = time.perf_counter()
            lowered.compile()
            end = time.perf_counter()
            if round_number == 0:  # the first round also imports, and warms up the compiler
                continue
            for part, value in zip(
                parts,
                (after_trace - start, after_lower - after_trace, end - after_lower, end - start),
                strict=True,
            ):
                seconds[name][part].append(value)
    return seconds


# --- records and tables ----------------------------------------------------------------------


def recorded(
    program: str, results: Mapping[str, Measurement], baseline: str | None
) -> list[Record]:
    """Return a record for each of the contenders that ran `program`, relative to one of them."""
    return [
        Record(
            program,
            name,
            seconds=spread(result.seconds),
            ratio=baseline and ratio(result.seconds, results[baseline].seconds),
            over=baseline,
            temp_bytes=result.temp_bytes,
            compile_seconds=result.compile_seconds,
        )
        for name, result in results.items()
    ]


def measurement_table(results: Mapping[str, Measurement], baseline: str) -> str:
    return table_of(recorded("", results, baseline))


# --- the machine -----------------------------------------------------------------------------


def keep_memory() -> None:
    """Starts the benchmark anew with memory kept from call to call, if it is not."""
    restart_with(kept_memory())


def use_one_thread() -> None:
    """Starts the benchmark anew with one thread for OpenBLAS, whose idle threads take a core."""
    restart_with({"OPENBLAS_NUM_THREADS": "1"})


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 2**30:.0f} GiB"


def machine() -> dict[str, str]:
    """Describe the machine and the versions that figures depend on."""
    device = jax.devices()[0]
    is_kept = all(v in os.environ.get(k, "") for k, v in kept_memory().items())
    return {
        "device": f"{device.platform}, {device.device_kind}",
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "memory": memory(),
        "memory of arrays": "kept" if is_kept else "as the system gives it",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "equinox": equinox.__version__,
        "loopkit": loopkit.__version__,
    }


def describe_machine() -> str:
    return table(("", ""), [*machine().items()])
