"""The first pages: what README says of memory, and that each picture is there twice."""

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import loopkit

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_memory_is_what_readme_says():
    text = (ROOT / "README.md").read_text().partition("## Memory")[2]
    (block,) = re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), jax.enable_x64(False):
        exec(block, {"jax": jax, "jnp": jnp, "loopkit": loopkit})
    two, every, default, eight = map(int, re.findall(r"^(\d+) bytes", printed.getvalue(), re.M))
    (megabytes,) = re.findall(r"On a CPU the first two are (\d+) MB, the third is a few mega", text)
    assert round(two / 1e6) == round(every / 1e6) == int(megabytes)
    assert 2e6 <= default < 1e7
    assert 2e5 <= eight < 1e6


def test_pictures_are_there_for_light_and_dark_pages():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"([\w-]+-(?:light|dark))\.svg", page.read_text())
    }
    assert len(named) >= 10
    assert {name.replace("-dark", "-light") for name in named} <= named
    for name in named:
        assert (ROOT / f"docs/pictures/{name}.svg").exists()
