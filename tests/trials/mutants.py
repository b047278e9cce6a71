"""Does it see? Mistakes made on purpose, of the kinds that were real ones.

    python -m trials.mutants [--programs N] [--seed S] [--expected FOLDER] [NAME...]    # in tests/

Each is a small change to a copy of the package, which programs then run with until one fails. Only
programs that the change makes another compiled program of are compiled. That a mutant survives says
that the grammar cannot write what would show it, or seldom does.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

import loopkit
from trials import transformations
from trials.compare import IllConditioned, Results, Trial, compare, compiled
from trials.hunt import chosen, expected, failure
from trials.implementations import Implementation

PACKAGE = Path(loopkit.__file__).parent
RIGHT = Implementation("loopkit", loopkit)
LONGEST = 300
"""Seconds of a processor after which a mutant is given up."""

WINDOW = 250


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    """Text that is there once."""
    new: str
    constructs: tuple[str, ...] = ()
    """What a program has to have, to show it: others are not run."""
    always: tuple[str, ...] = ()
    """What a program may have: of the constructs that are left out of half of all programs."""


class Budget(NamedTuple):
    programs: int
    seed: int
    folder: Path
    """Where what is expected of a program is kept."""


def mutants() -> list[Mutant]:
    """Those of `mutants.txt`."""
    text = Path(__file__).with_suffix(".txt").read_text()
    found = []
    for block in re.split(r"^= ", text, flags=re.MULTILINE)[1:]:
        name, file, *lines = block.strip("\n").splitlines()
        of = {sign: tuple(v[2:] for v in lines if v[0] == sign) for sign in "-+?!"}
        old, new = "\n".join(of["-"]), "\n".join(of["+"])
        found.append(Mutant(name, file, old, new, of["?"], of["!"]))
    return found


def applied(mutant: Mutant, package: Path) -> None:
    path = package / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places"
    path.write_text(text.replace(mutant.old, mutant.new))


def wrong_copy(mutant: Mutant, folder: Path) -> ModuleType:
    """The package with the mistake, under a name of its own: both run in one process."""
    package = folder / "mistaken"
    shutil.copytree(PACKAGE, package)
    applied(mutant, package)
    for path in package.rglob("*.py"):
        path.write_text(re.sub(r"\bloopkit\b", "mistaken", path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module("mistaken")


def lowered(trial: Trial, implementation: Implementation) -> Any:
    transformations.loopkit = implementation.loops  # of what replaces loops of lax
    with compiled(False):
        return jax.jit(trial.function(implementation)).lower(*trial.arguments())


def text_of(program: Any) -> str:
    return program.as_text().replace("mistaken", "loopkit")


def said_of(trial: Trial, wrong: Implementation, path: Path) -> str | None:
    """What is wrong; nothing if nothing is; None if it is the same program."""
    try:
        right = text_of(lowered(trial, RIGHT))
    except Exception:  # what JAX or loopkit refuses
        return None
    try:
        found = lowered(trial, wrong)
        if text_of(found) == right:
            return None
        with compiled(False):
            got = Results(*found.compile()(*trial.arguments()))
        compare(trial, got, expected(trial, path))
    except IllConditioned:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def shortest_first(trials: Iterator[tuple[int, Trial]]) -> Iterator[tuple[int, Trial]]:
    """Those of each `WINDOW` numbers by the length of their text: most of the time is JAX's."""
    for _, window in itertools.groupby(trials, lambda pair: pair[0] // WINDOW):
        yield from sorted(window, key=lambda pair: len(pair[1].program.body))


def search(mutant: Mutant, budget: Budget) -> str:
    """Which program fails first, and how; or how many would be others, and are as they should."""
    jax.config.update("jax_enable_x64", True)
    others = 0
    with tempfile.TemporaryDirectory() as folder:
        wrong = Implementation("loopkit", wrong_copy(mutant, Path(folder)))
        trials = shortest_first(chosen(budget.seed, mutant.constructs, mutant.always))
        for number, trial in itertools.islice(trials, budget.programs):
            path = budget.folder / f"{budget.seed}-{number}{'-'.join(mutant.always)}.pickle"
            said = said_of(trial, wrong, path)
            if said and not failure(trial, RIGHT, path):
                return f"killed: {mutant.name}: program {number}, {trial}: {said[:150]}"
            others += said is not None
    return f"SURVIVED: {mutant.name}: {others} of {budget.programs} programs were others"


def apart(mutant: Mutant, budget: Budget) -> tuple[str, float]:
    """The same in a process of its own, and the seconds of a processor that it took."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
        try:
            os.write(write, search(mutant, budget).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read().decode()
    _, status, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"SURVIVED: {mutant.name}: not done after {LONGEST} s", seconds
    return said or f"killed: {mutant.name}: crashed", seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", default=60, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--expected", default=tempfile.gettempdir(), help="what to keep it in")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    budget = Budget(given.programs, given.seed, Path(given.expected))
    chosen_ones = [m for m in mutants() if not given.names or any(n in m.name for n in given.names)]
    found, total = 0, 0.0
    for mutant in chosen_ones:
        said, seconds = apart(mutant, budget)
        found, total = found + said.startswith("killed"), total + seconds
        print(f"{seconds:.0f} s, {said}", flush=True)
    print(f"{found} of {len(chosen_ones)} killed, {total / 60:.0f} minutes of a processor")


if __name__ == "__main__":
    main()
