"""Does it see? Mistakes made on purpose, of the kinds that were real ones.

    python -m trials.mutants [--programs N] [--seed S] [--record FILE] [NAME...]    # in tests/

Each is a small change to a copy of the package, which programs then run with until one fails: of
those drawn from the seed that have what the mistake is about, cheap ones first. Only programs that
the change makes another compiled program of are compiled. That a mutant survives says that the
grammar cannot write what would show it, or seldom does. A mutant that stands in the record as
killed is not tried again.
"""

from __future__ import annotations

import argparse
import functools as ft
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

import loopkit
from trials import transformations
from trials.compare import IllConditioned, Results, Trial, compare, compiled
from trials.drawn import draw_trial
from trials.hunt import Uniform, failure
from trials.implementations import Implementation
from trials.records import constructs_of, lines_of

PACKAGE = Path(loopkit.__file__).parent
RIGHT = Implementation("loopkit", loopkit)
LONGEST = 300
"""Seconds of a processor after which a mutant is given up."""
DRAWN = 20_000
"""Programs among which those for a mutant are looked for: a millisecond each."""
CHOICE = 10
"""The number of programs that have all that is asked for, of which the cheapest is run."""


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    """Text that is there once."""
    new: str
    constructs: tuple[str, ...] = ()
    """The constructs that a program must have to show the mutant; others are not run."""
    always: tuple[str, ...] = ()
    """Constructs that a program has more often: half of all constructs are left out otherwise, and
    some are one choice among several."""


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


def said_of(trial: Trial, wrong: Implementation) -> str | None:
    """Say what is wrong; nothing if nothing is; None if it is the same program."""
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
        compare(trial, got)
    except IllConditioned:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


class Drawn(NamedTuple):
    number: int
    constructs: frozenset[str]
    cost: int

    def has(self, constructs: tuple[str, ...]) -> bool:
        """Names, or their beginnings; "a or b": one of two."""
        ways = (tuple(c.split(" or ")) for c in constructs)
        return all(any(name.startswith(way) for name in self.constructs) for way in ways)


@ft.cache
def drawn(seed: int, always: tuple[str, ...]) -> list[Drawn]:
    """Return the constructs in the programs of a seed; trials are drawn again from their
    numbers."""
    names: dict[str, str] = {}  # each once: there are millions
    found = []
    for number in range(DRAWN if not always else DRAWN // 2):
        trial = trial_of(seed, number, always)
        constructs = frozenset(names.setdefault(name, name) for name in constructs_of(trial))
        order = sum(letter in transformations.DERIVATIVES for letter in trial.pattern)
        found.append(Drawn(number, constructs, len(trial.program.body) * (2 + order)))
    return found


def trial_of(seed: int, number: int, always: tuple[str, ...]) -> Trial:
    return draw_trial(Uniform(seed * 1_000_000 + number, always))


def candidates(mutant: Mutant, seed: int, programs: int) -> list[int]:
    """Numbers of programs: the cheapest of every few that have what is asked for."""
    able = [p for p in drawn(seed, mutant.always) if p.has(mutant.constructs)]
    few = max(1, min(CHOICE, len(able) // programs))
    groups = [able[at : at + few] for at in range(0, len(able), few)][:programs]
    cheapest = [min(group, key=lambda p: p.cost) for group in groups]
    return [p.number for p in sorted(cheapest, key=lambda p: p.cost)]


def search(mutant: Mutant, seed: int, numbers: list[int]) -> str:
    """Return which program fails first, and how; or how many differ and are right."""
    jax.config.update("jax_enable_x64", True)
    others = 0
    with tempfile.TemporaryDirectory() as folder:
        wrong = Implementation("loopkit", wrong_copy(mutant, Path(folder)))
        for at, number in enumerate(numbers):
            trial = trial_of(seed, number, mutant.always)
            said = said_of(trial, wrong)
            if said and not failure(trial, RIGHT):
                which = f"program {number}, {trial}, the {at + 1}. of {len(numbers)}"
                return f"killed: {mutant.name}: {which}: {said[:150]}"
            others += said is not None
    return f"SURVIVED: {mutant.name}: {others} of {len(numbers)} programs were others"


def apart(mutant: Mutant, seed: int, numbers: list[int]) -> tuple[str, float]:
    """Search in a process of its own, and return its processor seconds, too."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
        try:
            os.write(write, search(mutant, seed, numbers).encode())
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
    parser.add_argument("--record", default=None, type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    chosen = [m for m in mutants() if not given.names or any(n in m.name for n in given.names)]
    before = {line["mutant"]: line for line in lines_of(given.record)}
    found, total = 0, 0.0
    for mutant in chosen:
        line = before.get(mutant.name)
        if line is None or not line["said"].startswith("killed"):
            numbers = candidates(mutant, given.seed, given.programs)
            said, seconds = apart(mutant, given.seed, numbers)
            line = {"mutant": mutant.name, "seed": given.seed, "said": said, "seconds": seconds}
            if given.record is not None:
                with given.record.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        found, total = found + line["said"].startswith("killed"), total + line["seconds"]
        print(f"{line['seconds']:.0f} s, {line['said']}", flush=True)
    print(f"{found} of {len(chosen)} killed, {total / 60:.0f} minutes of a processor")


if __name__ == "__main__":
    main()
