"""Loops compiled for a GPU and a TPU, on a machine that has neither.

    pip install '.[accelerators]'
    python benchmarks/accelerators.py                            # everything: some minutes
    python benchmarks/accelerators.py --quick
    python benchmarks/accelerators.py --only layer,rows
    python benchmarks/accelerators.py --page docs/accelerators.md

The last puts its tables into a page, in place of those that are there.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox
import jax

import accelerator_programs as programs
import ahead_of_time
import iterations
import workloads
from accelerator_programs import Case
from ahead_of_time import TARGETS
from executions import Executions, collectives
from findings import show_bytes, show_seconds, table
from thunks import kernels_by_pass, work

HEADERS = {
    "gpu": (
        *("", "memory", "kernels", "launches", "waits"),
        *("kernels a step, forward", "backward", "copies a step", "to compile"),
    ),
    "tpu": ("", "memory", "Mcycles", "copies a step", "to compile"),
}
GPT_HEADER = (
    *("policy, with lax", "memory", "on the host", "10^12 products", "Mcycles"),
    *("loopkit, memory", "on the host", "products relative to lax", "Mcycles relative to lax"),
)
TRIES = 8
"""The most budgets that are tried to stay within the memory of a policy."""
COUNTERS = 1024
"""Bytes that make no difference."""
MARKS = "<!-- tables -->\n", "<!-- end of tables -->\n"


def cells(case: Case, target: str) -> tuple[str, ...]:
    """Return what the compiler made of a gradient, as a row of a target's table."""
    made = ahead_of_time.compiled(target, case.function, *case.arguments)
    counts = made.counts(*case.arguments)
    executions = Executions(made, counts)
    copies = f"{executions.copies(case.large) / case.steps:.2g}" if case.large else ""
    if target == "gpu":
        by_pass = (f"{n / case.steps:.1f}" for n in kernels_by_pass(made, counts))
        figures = *(f"{n:,}" for n in work(made, counts)), *by_pass
    else:
        figures = (f"{executions.cycles / 1e6:.3g}",)
    memory, seconds = show_bytes(made.device_bytes), show_seconds(made.seconds)
    return case.name, memory, *figures, copies, seconds


def where_the_bytes_are(case: Case, target: str) -> tuple[str, ...]:
    made = ahead_of_time.compiled(target, case.function, *case.arguments)
    return case.name, show_bytes(made.device_bytes), show_bytes(made.host_bytes)


def what_devices_exchange(case: Case, target: str) -> tuple[str, ...]:
    shardings = programs.shardings(case, ahead_of_time.devices(target))
    made = ahead_of_time.compiled(target, case.function, *case.arguments, shardings=shardings)
    found = collectives(made)
    at_the_end, in_loops = (
        ", ".join(f"{n} {name}" for (name, inside), n in found.items() if inside == where) or "none"
        for where in (False, True)
    )
    return case.name, at_the_end, in_loops


class Needed(NamedTuple):
    """The memory and the work of a compiled gradient."""

    device: int
    host: int
    multiplications: float
    cycles: int

    def shown(self, target: str) -> tuple[str, ...]:
        host = show_bytes(self.host) if self.host else ""
        cycles = f"{self.cycles / 1e6:,.0f}" if target == "tpu" else ""
        return show_bytes(self.device), host, f"{self.multiplications / 1e12:.3g}", cycles


def _needed(case: Case, target: str) -> Needed:
    """Return what each device needs; products are those of all devices."""
    made = ahead_of_time.compiled(target, case.function, *case.arguments, shardings=case.shardings)
    counts = made.counts(*case.arguments)
    cycles = Executions(made, counts).cycles if target == "tpu" else 0
    many = iterations.multiplications(made.module, counts)
    return Needed(made.device_bytes, made.host_bytes, many, cycles)


def by_policy_and_budget(case: Case, target: str, count: int = 1) -> tuple[str, ...]:
    """Return a row of what a policy needs of lax, and loopkit in as much memory."""
    devices = ahead_of_time.devices(target, count) if count > 1 else ()
    if devices:
        case = next(c for c in programs.of_gpt(devices) if c.name == case.name)
    theirs = _needed(case, target)
    if (ours := _within(theirs, target, devices)) is None:
        return case.name, *theirs.shown(target), "no plan found", "", "", ""
    relative = [f"{ours.multiplications / theirs.multiplications:.2f}"]
    relative.append(f"{ours.cycles / theirs.cycles:.2f}" if theirs.cycles else "")
    return case.name, *theirs.shown(target), *ours.shown(target)[:2], *relative


def _within(most: Needed, target: str, devices: Sequence[Any]) -> Needed | None:
    """Return what loopkit needs with the largest budget found with which it needs no more.

    What the compiler needs beyond a budget is taken off. After that, the budget is halved in
    between.
    """
    best, low, high, memory = None, 0, most.device, most.device
    for _ in range(TRIES):
        try:
            budget = {"device": memory, "host": most.host}
            found = _needed(programs.gpt_within(budget, devices), target)
        except ValueError:  # less than any plan needs
            low, memory = memory, (memory + high) // 2
            continue
        over = found.device - most.device
        if over <= COUNTERS and found.host <= most.host + COUNTERS:
            if best is None or found.multiplications <= best.multiplications:
                best = found
            low, memory = memory, (memory + high) // 2
        else:
            high, memory = memory, (low + memory) // 2 if low else memory - max(over, memory // 8)
        if high - low <= most.device // 64:
            break
    return best


def of_engine(name: str) -> list[Case]:
    return programs.of_workload(workloads.make(name), programs.WITHOUT_COUNTS)


class Section(NamedTuple):
    """Gradients that are compared."""

    title: str
    cases: Callable[[], list[Case]]
    cells: Callable[[Case, str], tuple[str, ...]] = cells
    header: Sequence[str] | None = None
    targets: Sequence[str] = tuple(TARGETS)


SECTIONS = {
    "layer": Section(
        "1000 steps of `tanh(w @ x)`, 256 numbers", lambda: programs.of_workload(programs.layer())
    ),
    "unroll": Section(
        "The same, several steps to a round",
        lambda: programs.of_workload(programs.layer(), programs.UNROLLED),
    ),
    "rows": Section("2000 rows of 8x128, written to the carry", lambda: programs.of_rows((8, 128))),
    "short": Section("2000 rows of 10x5", lambda: programs.of_rows((10, 5))),
    **{
        name: Section(title, partial(of_engine, name))
        for name, title in {
            "mlp": "1000 steps of a network on 64x64 numbers",
            "vector": "2000 steps of 10,000 numbers",
            "lorenz": "10,000 Runge-Kutta steps of three numbers",
        }.items()
    },
    "decoding": Section(
        "Beam search with room for 200 tokens, 8 words of at most 20", programs.of_decoding
    ),
    "host": Section(
        "Checkpoints on the host: 1000 steps of 4 MB",
        programs.of_host,
        where_the_bytes_are,
        ("", "on the device", "on the host"),
    ),
    "gpt": Section(
        "24 layers of a GPT in the memory of a policy",
        programs.of_gpt,
        by_policy_and_budget,
        GPT_HEADER,
    ),
    "gpt8": Section(
        "The same on eight devices, with two sequences and an eighth of the weights on each",
        programs.of_gpt,
        partial(by_policy_and_budget, count=8),
        GPT_HEADER,
        ("tpu",),
    ),
    "devices": Section(
        "Four devices: what they exchange",
        programs.of_devices,
        what_devices_exchange,
        ("", "outside loops", "in loops"),
    ),
}
QUICK = "layer", "rows", "host"


def compare(section: Section, targets: Sequence[str]) -> str:
    """Return a table for each target, and a line that moves while they are made."""
    text = [f"### {section.title}"]
    cases = section.cases()
    for target in filter(section.targets.__contains__, targets):
        rows = []
        for number, case in enumerate(cases, 1):
            print(f"\r\033[K{target} {number}/{len(cases)}: {case.name}", end="", file=sys.stderr)
            rows.append(section.cells(case, target))
        header = section.header or HEADERS[target]
        text.append(table((TARGETS[target], *header[1:]), rows))
    print("\r\033[K", end="", file=sys.stderr)
    return "\n\n".join(text)


def put_into(page: Path, text: str) -> None:
    begin, end = MARKS
    pattern = re.compile(f"(?<={re.escape(begin)}).*(?={re.escape(end)})", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"\n{text}\n\n", page.read_text())
    if count != 1:
        raise SystemExit(
            f"{page} has no place for tables between {begin.strip()} and {end.strip()}"
        )
    page.write_text(changed)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--targets", default=",".join(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables into a page")
    options = parser.parse_args(argv)
    if reason := ahead_of_time.why_not():
        raise SystemExit(reason)
    versions = f"(jax {jax.__version__}, equinox {equinox.__version__})"
    text = [versions]
    print(versions)
    for name in QUICK if options.quick else options.only.split(","):
        text.append(compare(SECTIONS[name], options.targets.split(",")))
        print(f"\n{text[-1]}", flush=True)
    if options.page:
        put_into(options.page, "\n\n".join(text))


if __name__ == "__main__":
    main(sys.argv[1:])
