"""Every example has a page in the gallery, with all that belongs there; and every page has one."""

import ast

import pytest

import loopkit  # noqa: F401  (before what may be imported by names of examples/)
from gallery import EXAMPLES, GALLERY, entries

pytest.importorskip("nbformat")

import nbformat

import notebooks
import pages
from entries import readme_table

SHARED = {"comparison", "environment"}
each = pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.name)


def test_examples_are_those_of_the_gallery():
    assert set(entries()) == {path.stem for path in EXAMPLES.glob("*.py")} - SHARED


def test_nothing_is_kept_of_what_is_no_example():
    drawn, printed = ({path.stem for path in GALLERY.glob(f"*.{kind}")} for kind in ("webp", "txt"))
    assert drawn == set(entries())
    assert printed <= drawn


def test_the_readme_has_the_same_table():
    """`python docs/gallery/draw.py` writes it."""
    assert readme_table() in (EXAMPLES / "README.md").read_text()


@pytest.mark.every_case
@each
def test_a_page_is_complete(entry):
    page = pages.page(entry)
    assert len(entry.picture) > 80  # says what is to be seen
    assert f"\n![{entry.picture}]({entry.name}.webp)" in page
    assert 5_000 < entry.drawn.stat().st_size < 120_000
    assert entry.drawn.read_bytes()[8:12] == b"WEBP"
    if entry.printed.exists():
        assert f'--8<-- "docs/gallery/{entry.name}.txt"' in page
    else:  # it takes too long to be run for this page alone
        assert f"](../{entry.guide})" in page
    heading, told = entry.told
    assert heading in page
    assert told
    assert all(text in page for text in told)
    for path in [entry.program, *entry.beside]:
        said = f'--8<-- "examples/{path.relative_to(EXAMPLES).as_posix()}"'
        assert (said in page) == (path.name != "__init__.py")
    card = pages.card(entry)
    assert card in pages.index()
    assert f"[![{entry.picture}]({entry.name}.webp)" in card
    assert f"]({entry.name}.md)" in card


@pytest.mark.every_case
@each
def test_measured_beside_a_peer(entry):
    """The output of `compare` is a table; its first row is what the others are divided by."""
    if entry.measured or ("compare(" in entry.source and entry.printed.exists()):
        assert len(entry.costs) > 1
        assert entry.costs[0][2] == "1.00"
        assert all(f"| {row[0]} | {row[1]} |" in pages.page(entry) for row in entry.costs)


@each
def test_a_notebook_has_the_whole_program(entry):
    book = notebooks.notebook(entry, ["--steps", "3"])
    nbformat.validate(book)
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    for source in code:
        if not source.startswith("%%"):
            ast.parse(source)
    files = [path.read_text() for path in entry.beside]
    if entry.apart:
        files.append(entry.source)
    else:
        defined = [node.name for node in ast.parse(entry.source).body if hasattr(node, "name")]
        cells = [source for source in code if not source.startswith("%%")]
        found = [node.name for s in cells for node in ast.parse(s).body if hasattr(node, "name")]
        assert found == defined
    for text in files:
        assert any(source.endswith(f"\n{text}") for source in code)
    assert "'--steps', '3'" in "\n".join(code)
    assert book == notebooks.notebook(entry, ["--steps", "3"])  # the same each time
