"""Find the changes of the package that the tests do not see.

    python -m mutation ../loopkit/schedules --tests schedules               # in tests/
    python -m mutation ../loopkit/_engine --share 0.2 --tests engine test_vjp.py
    python -m mutation ../loopkit/schedules --tell      # a table, and what was not seen

Each of `--tests` is run once, to note which lines of the package it reaches. Then one change after
another (`changes.py`) is made, and the tests that reach it are run, the quick ones first, until one
fails, or `--seconds` of the processor are over. Both are kept in `--folder`: what stands there is
not done again, and what was noted of other tests is used as well.

One process has imported everything. For each change it forks, and the child changes the code of the
functions that exist; only what runs when a module is imported is imported again. Needs Python 3.12.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
DEFAULT = Path(tempfile.gettempdir()) / "loopkit-mutation"
ASKED = "not exhaustive and not programs and not trials and not accelerators and not site"
QUIET = ["-n", "0", "-s", "-m", ASKED, "-p", "no:cacheprovider", "-p", "no:terminal"]


class Plugin:
    """It takes the place of collecting, and of running."""

    def __init__(self, given: argparse.Namespace):
        self.given = given

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        session.items, session.testscollected = [], 1
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from mutation.server import Server  # imports jax, after `conftest.py` has said how

        server = Server(session, self.given)
        server.note()
        server.run()
        return True


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutation")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="*", default=[], type=Path, help="files and folders")
    parser.add_argument("--tell", action="store_true", help="what has come out")
    parser.add_argument("--folder", type=Path, default=DEFAULT)
    parser.add_argument("--most", type=int, default=4, help="cases of a test that are run")
    parser.add_argument("--seconds", type=float, default=5, help="of the processor, for a change")
    parser.add_argument("--share", type=float, default=1, help="of the changes of each file")
    parser.add_argument("--again", nargs="*", default=[], help="results: survived, late, unreached")
    given = parser.parse_args()
    given.paths, given.tests = (
        list(itertools.chain.from_iterable(map(files, paths)))
        for paths in (given.paths, given.tests)
    )
    return given


def files(path: Path) -> list[Path]:
    path = path.resolve()
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> None:
    sys.path.insert(0, str(TESTS.parent))  # this package, not one that is installed
    given = settings()
    compiled = given.folder / "compiled"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiled)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    compiled.mkdir(parents=True, exist_ok=True)
    if given.tell:
        from mutation.record import tell

        tell(given.folder, given.paths)
        return
    sys.exit(pytest.main([*QUIET, str(TESTS)], plugins=[Plugin(given)]))


if __name__ == "__main__":
    main()
