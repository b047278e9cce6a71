"""Prose: sentences of pages and docstrings that a reader understands at once.

The rules are few, and raise no false alarms: a docstring can be read without the line above it, a
sentence is short and has a subject, some words are not used, and a page explains its terms. They
read the texts alone; nothing is run.

    python tests/test_prose.py docs/lanes.md    # the complaints about some files
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "SECURITY.md"),
    *(ROOT / name / "README.md" for name in ("tests", "benchmarks", "examples")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LONGEST = 40
"""Words in a sentence, or in a part of it up to a colon or a semicolon."""
FRAGMENT = re.compile(r"(?:Of|With|By|What(?! happens)|The same|And)\b")
"""The beginning of a docstring that continues the line above it."""
NO_SUBJECT = re.compile(r"(?:Of(?! course)|And)\b|What .* is what\b")
"""The beginning of a sentence that has no subject, or hides it."""
STRANGE = re.compile(
    r"\b(also where|heed(s|ed)?|hang(s|ing)? on|when it likes|handed on|put off|one cannot|dear to"
    r"|content with|made anew|(is|are) no (arrays?|buffers?|numbers?))\b"
)
"""Words that are wrong, or rare, in technical English."""
TERMS = {
    "lane": r"lanes?",
    "carry": r"carry|carries",
    "residual": r"residuals?",
    "checkpoint": r"checkpoints?",
    "slot": r"slots?",
    "segment": r"segments?",
    "tangent": r"tangents?",
    "cotangent": r"cotangents?",
}
"""Terms that a guide links to the glossary where it first uses them."""
GUIDES = [
    path
    for path in (ROOT / "docs").glob("*.md")
    if path.stem not in ("api", "benchmarks", "changelog", "glossary", "references", "testing")
]


def plain(text: str, *, tables: bool = False) -> str:
    """Return a page without code, comments, headings, pictures, formulas and generated blocks."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- measured:.*?<!-- /measured -->", "\n\n", text, flags=re.DOTALL)
    for block in (r"^ *```.*?```", r"<!--.*?-->", r"\$\$.*?\$\$", r"<(\w+)[^>]*>.*?</\1>"):
        text = re.sub(block, "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    out = r"#|!|:::|--8<--" if tables else r"#|!|:::|--8<--|\|"
    lines = ("" if re.match(out, line.strip()) else line for line in text.splitlines())
    return re.sub(r"^ *(- |\d+\. )", "\n\n", "\n".join(lines), flags=re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, and their parts up to a colon or a semicolon."""
    for paragraph in re.split(r"\n\s*\n", plain(text)):
        joined = re.sub(r"`[^`]*`", "`code`", " ".join(paragraph.split()))
        joined = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", joined)
        joined = re.sub(r"\b(et al|e\.g|i\.e)\.", r"\1", joined)
        yield from (part.strip(" *()") for part in re.split(r"(?<=[.!?:;])\)? ", joined))


def complaints_about_page(path: Path) -> list[str]:
    found = []
    for sentence in sentences(path.read_text()):
        if len(sentence.split()) > LONGEST:
            found.append(f"more than {LONGEST} words: {sentence}")
        if NO_SUBJECT.match(sentence) or STRANGE.search(sentence):
            found.append(sentence)
    return found


def unexplained(path: Path) -> list[str]:
    """Return the terms that a page does not link to the glossary where it first uses them."""
    text = re.sub(r"`[^`]*`", "", plain(path.read_text(), tables=True))
    found = []
    for term, words in TERMS.items():
        first = re.search(rf"(?<![\w-])({words})(?![\w-])", re.sub(r"\]\([^)]*\)", "]", text), re.I)
        linked = re.search(rf"\[[^\]]*\]\((?:\.\./)?glossary\.md#{term}\)", text)
        if first and not linked:
            found.append(f"{term}: {text[max(0, first.start() - 40) : first.end() + 40]!r}")
    return found


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a file, of attributes and constants too, with their lines."""
    tree = ast.parse(path.read_text())
    texts = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    for body in texts:
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, inspect.cleandoc(text)


def complaints_about_code(path: Path) -> list[str]:
    return [
        f"{path}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(path)
        if FRAGMENT.match(text) or STRANGE.search(" ".join(text.split()))
    ]


def files() -> list[Path]:
    """Return the Python files of the project."""
    found = [*ROOT.glob("*.py"), *(ROOT / ".ci").glob("*.py")]
    for folder in ("loopkit", "benchmarks", "docs", "examples", "tests"):
        found += sorted((ROOT / folder).rglob("*.py"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_a_page_are_short_and_have_a_subject(path):
    assert complaints_about_page(path) == []


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_guide_links_its_terms_to_the_glossary(path):
    assert unexplained(path) == []


def test_a_docstring_can_be_read_alone():
    assert [text for path in files() for text in complaints_about_code(path)] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("# A heading\n\nOne. loopkit is two: three.", ["One.", "loopkit is two:", "three."]),
        ("- one `a. b`\n- [two](page.md)\n\n| a | b. c |", ["one `code`", "two"]),
        ("```python\nx = 1\n```\nAfter (Wu et al. 2026).", ["After (Wu et al 2026)."]),
    ],
)
def test_a_page_is_cut_into_sentences(text, parts):
    assert [part for part in sentences(text) if part] == [p.strip("()") for p in parts]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        one = Path(name).resolve()
        told = complaints_about_code(one) if one.suffix == ".py" else complaints_about_page(one)
        print(*told, sep="\n")
