"""One budget for a program: gradients in a part of the memory that `jax.lax` takes for them.

    python benchmarks/budgets.py                           # all programs
    python benchmarks/budgets.py --programs three,decoder --repeats 15

Each program gets 10, 20, 40 and 70 percent of the temporary memory of its gradient by JAX, as
`checkpointed(f, memory=..., measure=True)`. Then programs of three loops or more get 20 percent in
equal shares for their loops, by `replace_lax_loops(memory=...)`: the largest shares with which the
gradient, compiled, takes no more than these bytes.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax

import functions
import harness
import layers
import library_models
import library_solvers
import loopkit
import programs_of_loops
from harness import Measurement, describe_machine, measure, ratio, recorded, temp_bytes
from library_program import Program
from report import Report

PARTS = {0.1: 1.5, 0.2: 1.4, 0.4: 1.25, 0.7: 1.1}
"""The parts, and the most time relative to that of JAX; 1.33 is one more forward pass."""
SLACK = 1.02
SHARED = 0.2
"""The part at which equal shares are compared."""
SECTIONS = {"programs": "One budget for a program", "shares": "One budget, or equal shares of it"}
Made = tuple[Callable, tuple, Callable | None]
"""A loss, its arguments, and the gradient of a library's own if JAX has none."""


def of_layers(make: Callable[[], layers.Case]) -> Made:
    case = make()
    return layers.loss(jax.lax.scan, case), layers.arguments(case), None


def of_function(make: Callable[[], tuple[Callable, tuple]]) -> Made:
    function, arguments = make()
    return partial(function, wrap=lambda f: f), arguments, None


def of_loops(make: Callable[[], tuple[Callable, tuple]]) -> Made:
    return *make(), None


def of_library(make: Callable[[], Program]) -> Made:
    made = make()
    assert made.loss is not None
    own = next(iter(made.own.values()))
    return made.loss, (made.at,), lambda at: (own(at),)


LIBRARIES = {
    name: make
    for name, make in (library_models.PROGRAMS | library_solvers.PROGRAMS).items()
    if name.partition(":")[0] in ("dynamax", "numpyro", "flax", "jaxley", "ott")
    or name == "mjx: contact"
}
PROGRAMS: Mapping[str, Callable[[], Made]] = {
    **{name: partial(of_layers, make) for name, make in layers.CASES.items()},
    **{f"{n}, no loops": partial(of_function, f) for n, f in functions.FUNCTIONS.items()},
    **{name: partial(of_loops, make) for name, make in programs_of_loops.PROGRAMS.items()},
    **{name: partial(of_library, make) for name, make in LIBRARIES.items()},
}


def compare(
    report: Report,
    repeats: int,
    section: str = "programs",
    wanted: Mapping[str, Callable[[], Made]] = PROGRAMS,
) -> None:
    one = {"programs": _compare, "shares": _compare_shares}[section]
    for name, make in wanted.items():
        with jax.enable_x64(name in LIBRARIES):
            try:
                made = make()
            except ImportError as missing:
                report.note(f"{name} is left out: {missing}")
            else:
                one(report, repeats, name, made)


def _compare(report: Report, repeats: int, name: str, made: Made) -> None:
    loss, arguments, own = made
    of = tuple(range(len(arguments)))
    contenders = {"JAX": own or jax.grad(loss, of)}
    whole = temp_bytes(jax.jit(contenders["JAX"]).lower(*arguments).compile()) or 0
    for part in PARTS:
        within = loopkit.checkpointed(loss, memory=max(1, int(part * whole)), measure=True)
        gradient = jax.grad(within, of)
        try:
            jax.eval_shape(gradient, *arguments)
        except ValueError as refused:
            report.note(f"{name}, {part:.0%}: {refused}")
        else:
            contenders[f"{part:.0%}"] = gradient
    results = measure(contenders, arguments, repeats, rtol=2e-2, afresh=True)
    report.measured(recorded(name, results, "JAX"))
    _targets(report, name, results, whole)


def _compare_shares(report: Report, repeats: int, name: str, made: Made) -> None:
    loss, arguments, own = made
    loops = len(loopkit.explain(loopkit.checkpointed(loss), *arguments).loops)
    if loops < 3:
        return
    of = tuple(range(len(arguments)))
    whole = jax.jit(own or jax.grad(loss, of)).lower(*arguments).compile()
    budget = int(SHARED * (temp_bytes(whole) or 0))
    shares = _in_shares(loss, of, arguments, budget, loops)
    try:
        one = jax.grad(loopkit.checkpointed(loss, memory=budget, measure=True), of)
        jax.eval_shape(one, *arguments)
    except ValueError as refused:
        report.note(f"{name}: {refused}")
        return
    if shares is None:
        report.note(f"{name}: no equal shares fit in {budget:,} bytes")
        return
    contenders = {"equal shares": shares, "one budget": one}
    results = measure(contenders, arguments, repeats, rtol=2e-2, afresh=True)
    report.measured(recorded(name, results, "equal shares"))
    over = ratio(results["one budget"].seconds, results["equal shares"].seconds)
    report.target(f"{name}: time by that of equal shares", over, 0.87)


def _in_shares(
    loss: Callable, of: tuple, arguments: tuple, budget: int, loops: int
) -> Callable | None:
    """Return the gradient whose loops have equal shares, the largest with which all of it fits."""

    def sharing(share: float) -> Callable:
        def gradient(*given):
            with loopkit.replace_lax_loops(memory=max(1, int(share))):
                return jax.grad(loss, of)(*given)

        return gradient

    for halves in range(-4, 13):  # from four times the bytes, for loops that do not live together
        gradient = sharing(budget / loops * 2 ** (-halves / 2))
        try:
            compiled = jax.jit(gradient).lower(*arguments).compile()
        except ValueError:  # too few bytes for a loop
            return None
        if (temp_bytes(compiled) or 0) <= budget:
            return gradient
    return None


def _targets(report: Report, name: str, results: Mapping[str, Measurement], whole: int) -> None:
    before = None
    for part, most in PARTS.items():
        if (ours := results.get(f"{part:.0%}")) is None:
            continue
        report.target(
            f"{name}, {part:.0%}: time", ratio(ours.seconds, results["JAX"].seconds), most
        )
        report.target(
            f"{name}, {part:.0%}: memory of the budget", (ours.temp_bytes or 0) / (part * whole), 1
        )
        if before is not None:
            over = ratio(ours.seconds, before.seconds)
            report.target(f"{name}, {part:.0%}: time by that of the budget before", over, SLACK)
        before = ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="", help="whose names contain one of these")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="keep the report")
    given = parser.parse_args()
    harness.use_one_thread()
    begun, report = time.perf_counter(), Report()
    wanted = {n: p for n, p in PROGRAMS.items() if any(s in n for s in given.programs.split(","))}
    report.write(f"{describe_machine()}\n")
    for section, title in SECTIONS.items():
        report.write(f"# {title}\n")
        compare(report, given.repeats, section, wanted)
    report.summary()
    report.save(given.markdown)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
