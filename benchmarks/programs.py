"""Gradients through loops of libraries: their own way, and `loopkit.checkpointed`.

    pip install '.[programs]' && python benchmarks/programs.py [--only diffrax,dynamax] [--list]

Each program is compiled and run the library's own way (its adjoint, or `jax.lax`; forward mode
where there is no gradient), and through `checkpointed` with one or more settings: how far the
numbers are from the library's, time, temporary memory, and what tracing and compiling takes.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import harness
import library_models
import library_solvers
import loopkit
from library_program import Program

PROGRAMS = library_solvers.PROGRAMS | library_models.PROGRAMS
HEADER = ("program", "gradient", "differs", "temporary MB", "ms", "of own", "trace s", "compile s")
WRONG, FAILED = "WRONG", "FAILED"


class Compiled(NamedTuple):
    call: Callable[[], Any]
    trace_seconds: float
    compile_seconds: float
    temp_bytes: int


def warm_up() -> None:
    """Traces and compiles something small, both ways, so that the first program does not pay."""
    for loop in (jax.lax.scan, loopkit.checkpointed(jax.lax.scan)):
        loss = lambda x, loop=loop: loop(lambda x, _: (jnp.sin(x), x), x, None, 100)[0]
        jax.jit(jax.grad(loss)).lower(1.0).compile()


def compiled(function: Callable, at: Any) -> Compiled:
    """Nothing that another function has had traced is used again."""
    jax.clear_caches()
    start = harness.clock()
    lowered = jax.jit(function).lower(at)
    traced = harness.clock()
    done = lowered.compile()
    end = harness.clock()
    return Compiled(lambda: done(at), traced - start, end - traced, harness.temp_bytes(done) or 0)


def difference(want: Any, got: Any) -> float:
    """The largest of all leaves, of the largest number of the leaf."""
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)


def compiled_or_not(functions: Mapping[str, Callable], at: Any) -> dict[str, Compiled | Exception]:
    found: dict[str, Compiled | Exception] = {}
    for how, function in functions.items():
        try:
            found[how] = compiled(function, at)
        except Exception as error:  # of one of many libraries: the others are still measured
            found[how] = error
    return found


def rows(name: str, made: Program, repeats: int) -> Iterator[tuple[str, ...]]:
    functions = made.own | made.ours
    first = next(iter(functions))
    jax.jit(functions[first]).trace(made.at)  # what is imported, or cached elsewhere, is so now
    found = compiled_or_not(functions, made.at)
    programs = {how: p for how, p in found.items() if isinstance(p, Compiled)}
    seconds = harness.interleave({how: p.call for how, p in programs.items()}, repeats)
    for how, program in found.items():
        if isinstance(program, Exception):
            yield name, how, FAILED, f"{type(program).__name__}: {str(program).splitlines()[0]}"
            continue
        apart = difference(programs[first].call(), program.call())
        yield (
            name,
            how,
            f"{apart:.0e}" if apart <= made.tolerance else f"{apart:.0e} {WRONG}",
            f"{program.temp_bytes / 1e6:.3f}",
            f"{1e3 * median(seconds[how]):.3g}",
            "1.00" if how == first else str(harness.ratio(seconds[how], seconds[first])),
            f"{program.trace_seconds:.1f}",
            f"{program.compile_seconds:.1f}",
        )


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def show(wanted: Mapping[str, Callable[[], Program]], repeats: int) -> bool:
    """Prints a row a gradient as it is measured; whether there are all, and their numbers agree."""
    print(line(HEADER), line(("---",) * len(HEADER)), sep="\n", flush=True)
    right = True
    for name, make in wanted.items():
        try:
            made = make()
        except ImportError as missing:
            print(f"{name}: left out, {missing}", flush=True)
            continue
        for row in rows(name, made, repeats):
            print(line(row), flush=True)
            right &= not row[2].endswith((WRONG, FAILED))
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="programs whose names contain one of these")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--list", action="store_true", help="the names, and nothing else")
    parser.add_argument("--cpu", action="store_true", help="time of all cores, not of the clock")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    wanted = {n: p for n, p in PROGRAMS.items() if any(s in n for s in options.only.split(","))}
    if options.list:
        print(*wanted, sep="\n")
        return
    if options.cpu:
        harness.clock = time.process_time
    print(harness.describe_machine(), end="\n\n")
    warm_up()
    if not show(wanted, options.repeats):
        sys.exit(f"see the rows with {WRONG} or {FAILED}")


if __name__ == "__main__":
    main()
