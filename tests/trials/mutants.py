"""Does it see? Mistakes made on purpose, of the kinds that were real ones.

    python -m trials.mutants [--programs N] [--seed S] [NAME...]    # in tests/

Each is a small change to a copy of the package, which the trials then run with until one fails.
That a mutant survives says that the grammar cannot write what would show it, or seldom does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    """Text that is there once."""
    new: str
    constructs: tuple[str, ...] = ()
    """What a program has to have, to show it: others are not run."""


def mutants() -> list[Mutant]:
    """Those of `mutants.txt`."""
    text = Path(__file__).with_suffix(".txt").read_text()
    found = []
    for block in re.split(r"^= ", text, flags=re.MULTILINE)[1:]:
        name, file, *lines = block.strip("\n").splitlines()
        old, new = ("\n".join(v[2:] for v in lines if v[0] == sign) for sign in "-+")
        found.append(Mutant(name, file, old, new, tuple(v[2:] for v in lines if v[0] == "?")))
    return found


def applied(mutant: Mutant, package: Path) -> None:
    path = package / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places"
    path.write_text(text.replace(mutant.old, mutant.new))


def killed(mutant: Mutant | None, programs: int, seed: int, expected: str) -> str:
    """What the first trial said that failed; nothing if none did. None: of the package as it is."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "loopkit"
        shutil.copytree(TESTS.parent / "loopkit", package)
        if mutant is not None:
            applied(mutant, package)
        paths = os.pathsep.join([folder, str(TESTS)])
        command = [sys.executable, "-m", "trials.hunt", str(programs), str(seed), expected]
        command += () if mutant is None else mutant.constructs
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode == 0:
        return ""
    return (done.stdout.strip() or done.stderr.strip() or "crashed").splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", default=400, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--expected", default=tempfile.gettempdir(), help="what to keep it in")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    chosen = [m for m in mutants() if not given.names or any(n in m.name for n in given.names)]
    found, how = 0, (given.programs, given.seed, given.expected)
    said = killed(None, *how)
    if said:
        sys.exit(f"the package as it is fails: {said}")
    for mutant in chosen:
        began = time.monotonic()
        said = killed(mutant, *how)
        found += bool(said)
        what = "killed" if said else "SURVIVED"
        print(f"{what}: {mutant.name} ({time.monotonic() - began:.0f} s) {said[:150]}", flush=True)
    print(f"{found} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
