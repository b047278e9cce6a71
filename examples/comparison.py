"""Tables that compare time and memory of compiled functions: the examples print them of their
peers."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import jax


class Cost(NamedTuple):
    seconds: float  # the median of the calls
    bytes: int | None  # temporary memory by the compiler's account; None without one


def compare(functions: Mapping[str, Callable], *args: Any, repeats: int = 7) -> dict[str, Cost]:
    """Calls each of the functions in turn, round after round, and prints what they cost."""
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for round_number in range(repeats + 1):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            if round_number:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    costs = {}
    for name, f in compiled.items():
        analysis = f.memory_analysis()
        temporary = None if analysis is None else analysis.temp_size_in_bytes
        costs[name] = Cost(median(seconds[name]), temporary)

    width = max(map(len, costs))
    first = next(iter(costs.values())).seconds
    print(f"  {'':{width}}      time  of the first    temporary memory")
    for name, (took, temporary) in costs.items():
        memory = "unknown" if temporary is None else f"{temporary / 1e6:.2f} MB"
        print(f"  {name:{width}} {1e3 * took:7.2f} ms {took / first:13.2f} {memory:>19}")
    return costs
