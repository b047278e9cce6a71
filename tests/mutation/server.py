"""One process that has imported everything, and forks for each piece of work."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import pkgutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import hypothesis
import pytest
from jax._src import xla_bridge

from mutation import changes, forked, lines, record

TESTS = Path(__file__).resolve().parent.parent
PACKAGE = str(TESTS.parent / "loopkit")

hypothesis.settings.register_profile(
    "mutation",
    database=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


class Test:
    """Facts about a test."""

    def __init__(self, name: str, seconds: float, reached: list[lines.Line]):
        self.name, self.seconds = name, seconds
        self.reached = frozenset(reached)
        self.file, _, case = name.partition("::")
        self.function = self.file, case.partition("[")[0]


class Server:
    """In a session of pytest, without its collecting and running."""

    def __init__(self, session: pytest.Session, given: argparse.Namespace):
        self.session, self.given = session, given
        self.folder = given.folder / "reached"
        self.items: dict[str, pytest.Item] = {}
        with lines.noted(PACKAGE) as self.imported:
            import_all()
        self.functions = lines.functions_of(PACKAGE)
        self.tests: list[Test] = []
        self.alone: dict[str, bool] = {}
        """Tests that saw a change: do they pass without it?"""

    def note(self) -> None:
        """Note which lines each test reaches."""
        self.folder.mkdir(exist_ok=True)
        for path in self.given.tests:
            file = self.folder / f"{path.parent.name}-{path.stem}.json"
            if not path.name.startswith("test_") or file.exists():
                continue
            began = time.monotonic()
            found = forked.in_child(lambda path=path: self.reached_by(path))
            if found.ended_by == 0:
                file.write_text(json.dumps(found.said))
            print(
                f"{path.name}: {len(found.said) - 1} tests, {found.seconds:.1f} s of the processor,"
                f" {time.monotonic() - began:.0f} s",
                flush=True,
            )

    def reached_by(self, path: Path) -> Iterator:
        items = self.collect(str(path))
        yield {"file": str(path), "backend": bool(xla_bridge._backends)}
        for item in some(items, self.given.most):
            before, began = self.session.testsfailed, time.process_time()
            with lines.noted(PACKAGE) as reached:
                passed = self.passes(item)
            if passed:
                seconds = time.process_time() - began
                yield {"test": item.nodeid, "seconds": seconds, "reached": sorted(reached)}
            else:
                print("fails as it is:", item.nodeid, before, file=sys.stderr)

    def collect(self, path: str) -> list[pytest.Item]:
        hypothesis.settings.load_profile("mutation")
        items = self.session.perform_collect([path])
        self.items |= {item.nodeid: item for item in items}
        return list(items)

    def passes(self, item: pytest.Item) -> bool:
        before = self.session.testsfailed
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.session.testsfailed == before

    def run(self) -> None:
        self.read_notes()
        done, began = record.results(self.given.folder), time.monotonic()
        for path in self.given.paths:
            file, killers = record.name_of(path), []
            chosen = spread(changes.all_changes(path))
            count = defaultdict(int)
            for change in chosen[: round(len(chosen) * self.given.share + 0.499)]:
                old = done.get((file, change.name))
                if old is None or old["result"] in self.given.again:
                    row = self.tried(path, change, killers)
                    record.add(self.given.folder, row)
                    count[row["result"]] += 1
            if count:
                print(f"{file}: {dict(count)}, {time.monotonic() - began:.0f} s", flush=True)

    def read_notes(self) -> None:
        for file in sorted(self.folder.glob("*.json")):
            head, *rows = json.loads(file.read_text())
            if not head["backend"]:
                self.collect(head["file"])
            for row in rows:
                reached = [lines.Line(*line) for line in row["reached"]]
                self.tests.append(Test(row["test"], row["seconds"], reached))
        assert not xla_bridge._backends, "a test's module computes as it is imported"

    def tried(self, path: Path, change: changes.Change, killers: list[str]) -> dict:
        tests = self.in_order(record.name_of(path), change, killers)
        result, by, ran, seconds, ended_by = "unreached", None, 0, 0.0, 0
        if tests:
            outcome = forked.in_child(lambda: self.child(path, change, tests))
            seconds, ended_by = outcome.seconds, outcome.ended_by
            result, by, ran = verdict(outcome)
            if result == "seen" and by is not None:
                if not self.passes_alone(by):
                    self.tests = [test for test in self.tests if test.name != by]
                    return self.tried(path, change, killers)
                killers[:] = [by, *(name for name in killers if name != by)]
        return {
            "file": record.name_of(path),
            "change": change.name,
            "result": result,
            "by": by,
            "ran": ran,
            "of": len(tests),
            "seconds": round(seconds, 2),
            "ended_by": ended_by,
        }

    def passes_alone(self, name: str) -> bool:
        if name not in self.alone:
            test = next(test for test in self.tests if test.name == name)
            outcome = forked.in_child(lambda: self.child(None, None, [test]))
            self.alone[name] = verdict(outcome)[0] == "survived"
            if not self.alone[name]:
                print("fails by itself:", name, flush=True)
        return self.alone[name]

    def in_order(self, file: str, change: changes.Change, killers: list[str]) -> list[Test]:
        """First what saw the last changes, then the quick ones, one case of each test first."""
        exact = lines.Line(file, change.line)
        near = {lines.Line(file, number) for number in change.lines}
        found = [test for test in self.tests if exact in test.reached]
        found = found or [test for test in self.tests if not near.isdisjoint(test.reached)]
        if not found and (not change.in_function or near & self.imported):
            name = file
            found = [t for t in self.tests if any(line.file == name for line in t.reached)]
        cases, turn = defaultdict(int), {}
        for test in sorted(found, key=lambda test: test.seconds):
            turn[test.name] = cases[test.function]
            cases[test.function] += 1
        recent = {name: at for at, name in enumerate(killers[:5])}
        key = lambda test: (recent.get(test.name, 9), turn[test.name], test.seconds)
        return sorted(found, key=key)

    def child(self, path: Path | None, change, tests: list[Test]) -> Iterator:
        """Names of tests, and whether they passed."""
        if path is not None:
            self.put(path, change)
        for test in tests:
            yield test.name
            forked.allow(2 + 5 * test.seconds)
            if not self.found(test) or not self.passes(self.items[test.name]):
                yield False
                return
            yield True
            if time.process_time() > self.given.seconds:
                return

    def found(self, test: Test) -> bool:
        """Whether its module can be imported, if not for the change."""
        if test.name not in self.items:
            try:
                self.collect(str(TESTS.parent / test.file))
            except pytest.UsageError:
                raise
            except Exception:
                return False
        return test.name in self.items

    def put(self, path: Path, change: changes.Change) -> None:
        old, new = (changes.changed(path, made) for made in (None, change))
        near = {lines.Line(record.name_of(path), number) for number in change.lines}
        if change.in_function and not near & self.imported:
            swapped = 0
            for a, b in lines.pairs(old, new):
                for function in self.functions.get(lines.place(a), ()):
                    function.__code__ = b
                    swapped += 1
            if swapped:
                return
        self.items = {}
        import_again(path, new)


def verdict(outcome: forked.Outcome) -> tuple[str, str | None, int]:
    """Return the verdict, the test that gave it, and how many tests have run."""
    names = [said for said in outcome.said if isinstance(said, str)]
    ran = sum(isinstance(said, bool) for said in outcome.said)
    if outcome.ended_by in (signal.SIGKILL, signal.SIGXCPU):
        return "late", names[-1] if names else None, ran
    assert outcome.ended_by or (names and len(names) == ran), "an error of this program's own"
    if False in outcome.said or outcome.ended_by:
        return "seen", names[-1] if names else None, ran
    return "survived", None, ran


def import_all() -> None:
    import loopkit

    assert Path(loopkit.__file__).parent == Path(PACKAGE)
    for module in pkgutil.walk_packages(loopkit.__path__, "loopkit."):
        importlib.import_module(module.name)


def import_again(path: Path, code: CodeType) -> None:
    """The package, of which one file has other code, and the tests, when they are asked for."""
    kept = str(TESTS / "mutation"), str(TESTS / "conftest.py")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        ours = file.startswith((PACKAGE, str(TESTS))) and not file.startswith(kept)
        if ours and name != "__main__":
            del sys.modules[name]
    changed_name = ".".join(["loopkit", *path.relative_to(PACKAGE).with_suffix("").parts])

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return code

    class Finder:
        @staticmethod
        def find_spec(fullname: str, *_):
            if fullname == changed_name:
                loader = Loader(fullname, str(path))
                return importlib.util.spec_from_file_location(fullname, path, loader=loader)
            return None

    sys.meta_path.insert(0, Finder)


def some(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return so many cases of each test, spread over all of them."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {item.nodeid for group in cases.values() for item in spread(group)[:most]}
    return [item for item in items if item.nodeid in chosen]


def spread(of: list) -> list:
    """In an order of which each beginning is from all over: by the bits of the place, reversed."""
    bits = len(of).bit_length()
    return [of[at] for at in sorted(range(len(of)), key=lambda n: f"{n:0{bits}b}"[::-1])]
