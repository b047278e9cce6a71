"""A project's own tests, without loopkit and with its loops replaced: which of them pass.

    python benchmarks/suites.py tests/                      # of a checkout
    python benchmarks/suites.py --sdist optax optax/_src    # of what is installed, fetched by pip
    python benchmarks/suites.py tests/ -- -k linesearch     # what follows -- is pytest's

Both run with the same pytest, one after the other. Exits with 1 if a test passes without loopkit
alone; what passes with it alone, such as a test that now finds a gradient, is named too.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

REPLACED = "loops of lax replaced"


def fetched(name: str, folder: Path) -> Path:
    """Return the source of the version that is installed."""
    wanted = f"{name}=={importlib.metadata.version(name)}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name, wanted]
    subprocess.run([*pip, "-d", str(folder)], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def outcome(case: ET.Element) -> str:
    found = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return found[0] if found else "passed"


def run(where: Path, options: list[str], report: Path) -> tuple[dict[str, str], int]:
    """Run tests, and return the outcome of each, and the number of those in which loops were
    replaced."""
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options]
    print("$", *command, flush=True)
    subprocess.run(command, cwd=where, check=False)
    outcomes, with_loops = {}, 0
    for case in ET.parse(report).iter("testcase"):
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome(case)
        with_loops += any(
            p.get("name") == REPLACED and int(p.get("value", 0)) for p in case.iter("property")
        )
    return outcomes, with_loops


def named(title: str, names: list[str]) -> None:
    print(f"{title}: {len(names)}", *names, sep="\n  ")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sdist", help="fetch the source of this installed project, and run there")
    parser.add_argument("options", nargs="+", help="tests to run, and further options of pytest")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = fetched(asked.sdist, folder) if asked.sdist else Path.cwd()
        plain, _ = run(where, asked.options, folder / "plain.xml")
        plugin = ["-p", "pytest_loopkit", "--loopkit-replaces"]
        replaced, with_loops = run(where, [*plugin, *asked.options], folder / "replaced.xml")
    passed = {test for test, how in plain.items() if how == "passed"}
    passed_replaced = {test for test, how in replaced.items() if how == "passed"}
    print(f"without: {dict(Counter(plain.values()))}")
    print(f"with:    {dict(Counter(replaced.values()))}, loops replaced in {with_loops} tests")
    named("pass with loopkit alone", sorted(passed_replaced - passed))
    named("pass without loopkit alone", sorted(passed - passed_replaced))
    return int(bool(passed - passed_replaced))


if __name__ == "__main__":
    sys.exit(main())
