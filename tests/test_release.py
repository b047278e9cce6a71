"""Releases: one version, one window of JAX and Python, one changelog."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import loopkit

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name):
    path = ROOT / name
    if not path.exists():  # of .ci, in an sdist
        pytest.skip(f"no {name} here")
    return path.read_text()


def test_the_version_is_written_once():
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", loopkit.__version__)


def test_a_citation_names_the_version():
    assert re.findall(r"^version: (.*)$", read("CITATION.cff"), re.M) == [loopkit.__version__]
    assert re.findall(r"version = \{(.*)\}", read("README.md")) == [loopkit.__version__]


def test_the_changelog_is_in_shape():
    """Newest first: what is not released yet, then versions with dates."""
    headings = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.M)
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \(\d{4}-\d\d-\d\d\)", h) for h in headings]
    released = versions[1:] if headings[0] == "Unreleased" else versions
    assert all(released), headings
    numbers = [tuple(map(int, match.groups())) for match in released]
    assert numbers == sorted(set(numbers), reverse=True)


def test_the_oldest_jax_and_python_are_the_same_everywhere():
    (jax,) = [d.partition(">=")[2] for d in PROJECT["dependencies"] if d.startswith("jax>=")]
    python = PROJECT["requires-python"].removeprefix(">=")
    page = read("docs/versions.md")
    assert f"| JAX | {jax} |" in page
    assert f"| Python | {python} |" in page
    assert f"jaxlib>={jax}" in PROJECT["dependencies"]
    assert f"JAX {jax}" in read("README.md")
    assert f"Python {python}" in read("README.md")
    assert f"oldest_jax={jax}\n" in read(".ci/run")


def test_pythons_are_those_that_the_page_of_versions_names():
    oldest, newest = re.search(
        r"\| Python \| 3\.(\d+) \| 3\.(\d+) \|", read("docs/versions.md")
    ).groups()
    named = [
        f"Programming Language :: Python :: 3.{n}" for n in range(int(oldest), int(newest) + 1)
    ]
    assert [c for c in PROJECT["classifiers"] if re.search(r"3\.\d+$", c)] == named


def test_nothing_is_imported_that_takes_long():
    """`python .ci/import_time.py` measures it."""
    command = [sys.executable, "-c", "import sys, loopkit; print(*sys.modules)"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "jax.experimental.jet" not in imported
    packages = {name.partition(".")[0] for name in imported}
    assert "loopkit" in packages
    assert not {"equinox", "matplotlib", "pandas", "scipy", "IPython", "tqdm"} & packages
