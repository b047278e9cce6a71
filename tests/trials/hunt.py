"""Programs until one fails, in one process and without making it smaller.

    python -m trials.hunt PROGRAMS SEED [FOLDER [CONSTRUCT...]]    # in tests/

Says which; the exit status is 1 then. No hypothesis: what is drawn here is uniform. What is
expected of each program is kept in the folder, and taken from there the next time. With constructs,
by the names that `records.py` prints, only programs that have all of them are run.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FLAGS = "--xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from trials.compare import IllConditioned, Trial, compare  # noqa: E402
from trials.drawn import draw_trial  # noqa: E402
from trials.draws import Draws  # noqa: E402
from trials.implementations import IMPLEMENTATIONS, Implementation  # noqa: E402
from trials.printed import printed  # noqa: E402
from trials.records import constructs_of  # noqa: E402


class Uniform(Draws):
    def __init__(self, seed: int, always: Iterable[str] = ()):
        """`always`: constructs that each program may have, and choices that are made more often."""
        super().__init__(None)
        self.random, self.always = random.Random(seed), frozenset(always)

    def some(self, constructs: Iterable[str]) -> frozenset[str]:
        return super().some(constructs) | self.always

    def weighted(self, items: dict[Any, int]) -> Any:
        return super().weighted(
            {k: n * (5 if str(k) in self.always else 1) for k, n in items.items()}
        )

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


def expected(trial: Trial, path: Path | None) -> Any:
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())
    found = trial.expected()
    if path is not None:
        as_numpy = jax.tree.map(np.asarray, found)
        path.write_bytes(pickle.dumps(as_numpy))
    return found


def failure(trial: Trial, implementation: Implementation, path: Path | None = None) -> str:
    """Say in one line what is wrong; return nothing if nothing is."""
    if implementation.cannot(trial.program, trial.pattern, trial.outside):
        return ""
    try:
        compare(trial, trial.through(implementation), expected(trial, path))
    except IllConditioned:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def chosen(
    seed: int, constructs: Iterable[str], always: Iterable[str] = ()
) -> Iterator[tuple[int, Trial]]:
    """Numbers and trials, of those that have all of some constructs; "a or b": one of two.

    The beginning of a name stands for all that begin so. `always`: as in `Uniform`.
    """
    ways = [tuple(c.split(" or ")) for c in constructs]
    for number in range(1_000_000):
        trial = draw_trial(Uniform(seed * 1_000_000 + number, always))
        has = constructs_of(trial)
        if all(any(name.startswith(way) for name in has) for way in ways):
            yield number, trial


def main(programs: int, seed: int, folder: str | None = None, *constructs: str) -> int:
    jax.config.update("jax_enable_x64", True)
    for number, trial in itertools.islice(chosen(seed, constructs), programs):
        path = None if folder is None else Path(folder) / f"{seed}-{number}.pickle"
        said = failure(trial, IMPLEMENTATIONS["loopkit"], path)
        if said:
            print(f"{printed(trial)}\n\nprogram {number}, {trial}: {said[:500]}")
            return 1
        if number % 50 == 49:
            jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
