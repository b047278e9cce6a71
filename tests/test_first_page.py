"""What the first pages say of time and memory is what docs/benchmarks.md has measured."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
AMOUNT = re.compile(r"\d[\d.]* (?:us|ms|s|kB|MB)(?![a-z])")
ROWS = [
    line
    for line in (*README.splitlines(), *(ROOT / "docs/index.md").read_text().splitlines())
    if line.startswith("| ") and "benchmarks.md#" in line
]


def table(link):
    """The tables of a loop in the section of docs/benchmarks.md that a row links to."""
    loop, anchor = re.search(r"\[(\w+)\]\((?:docs/)?benchmarks\.md#([\w-]+)\)", link).groups()
    for section in re.split(r"^## ", BENCHMARKS, flags=re.M):
        title = section.partition("\n")[0]
        if re.sub(r"[^\w ]", "", title).lower().replace(" ", "-") == anchor:
            return next(t for t in section.split("### ") if t.startswith(f"{loop},"))
    raise AssertionError(f"no section {anchor}")


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_what_was_measured(row):
    lines = [re.split(r"\s*\|\s*", line) for line in table(row).splitlines()]
    amounts = [AMOUNT.findall(cell) for cell in row.split("|")]
    assert any(amounts)
    for cell in filter(None, amounts):
        assert any(set(cell) <= set(line) for line in lines), cell


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_what_the_picture_shows_is_told_in_words(page):
    text = (ROOT / page).read_text()
    (told,) = set(re.findall(r'alt="([^"]*)"|!\[([^\]]*)\]\(pictures/first', text)) - {("", "")}
    amounts = AMOUNT.findall("".join(told))
    assert len(amounts) == 12
    section = BENCHMARKS.partition("## Gradient, default checkpoints")[2].partition("\n## ")[0]
    lines = [set(re.split(r"\s*\|\s*", line)) for line in section.splitlines()]
    for time, memory in zip(amounts[::2], amounts[1::2], strict=True):
        assert any({time, memory} <= line for line in lines), (time, memory)


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
