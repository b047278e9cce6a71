"""Types that users' type checkers see: pyright and mypy check these programs, and they run."""

import importlib.util
import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from jax import lax

import loopkit
from loopkit import _keywords as keywords
from loopkit._foreign.lax_loop import CheckpointedKw, ReplaceKw

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path for path in (ROOT / "tests/typed").glob("*.py") if path.stem != "rejected")
KEYWORDS = {
    "while_loop": keywords.WhileKw,
    "fori_loop": keywords.ForiKw,
    "scan": keywords.ScanKw,
    "unbounded_scan": keywords.UnboundedKw,
    "ragged_scan": keywords.RaggedKw,
    "checkpointed": CheckpointedKw,
    "replace_lax_loops": ReplaceKw,
}
CHECKS = {
    "pyright": ("pyright", "--pythonpath", sys.executable),
    "mypy": ("mypy", "--python-executable", sys.executable, "--cache-dir", os.devnull),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_programs_run(path):
    runpy.run_path(str(path))


def run_checker(name, *args, **options):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install '.[dev]'")
    run = [sys.executable, "-m", *args]
    outcome = subprocess.run(run, capture_output=True, text=True, check=False, **options)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHECKS)
def test_checkers_agree(name):
    run_checker(name, *CHECKS[name], cwd=ROOT)


@pytest.mark.slow
def test_every_public_type_is_known(tmp_path):
    # Here pyright asks the `python` on PATH where packages are.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    verify = "pyright", "--verifytypes", "loopkit", "--ignoreexternal"
    run_checker("pyright", *verify, cwd=tmp_path, env=env)


@pytest.mark.every_case
@pytest.mark.parametrize("name", KEYWORDS)
def test_overloads_take_every_keyword(name):
    parameters = inspect.signature(getattr(loopkit, name)).parameters.values()
    own = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if name == "scan":  # what lax takes by position too
        own |= {"length", "reverse", "unroll", "_split_transpose"}
    assert set(KEYWORDS[name].__annotations__) == own


def test_signatures_are_those_that_run():
    """Not those of overloads."""
    assert list(inspect.signature(loopkit.scan).parameters)[:7] == list(
        inspect.signature(lax.scan).parameters
    )
    assert str(inspect.signature(loopkit.while_loop)).endswith("'T | tuple[T, LoopInfo]'")


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "loopkit/py.typed").exists()
