"""The pages of the gallery, in Markdown: a grid of all examples, and a page for each."""

from entries import Entry, entries

GRID = """# Gallery

These are the programs of `examples/`. Each says what it does, prints its measurements and draws its
results, and is a notebook, too. To run one, type `pip install '.[examples]'`, then the command on
its page. Times and memory are from two cores of a CPU that also did other things: compare within a
table, not between tables.

<div class="gallery" markdown>

{cards}

</div>
"""

CARD = """<div class="gallery-card" markdown>

[![{picture}]({name}.webp){kept}]({name}.md)

**[{title}]({name}.md)**

{said}. *Takes {takes}.*

</div>"""

PAGE = """# {title}

{heading}

![{picture}]({name}.webp){kept}

{told}

```bash
python examples/{name}.py
```

It takes {takes} on two cores; `--help` lists its settings. The notebook
[{name}.ipynb]({name}.ipynb){{ download="{name}.ipynb" }} has everything that it
needs, except packages.

{guided}{measured}{prints}## The program

```python
--8<-- "examples/{name}.py"
```
{beside}"""

BESIDE = """
??? note "{path}"

    ```python
    --8<-- "examples/{path}"
    ```
"""

GUIDED = """[A page of the documentation]({guide}) says more about it, with figures.

"""

PRINTS = """## What it prints

```text
--8<-- "docs/gallery/{name}.txt"
```

"""

COSTS = """## Compared with other programs

| | time | relative to the first | temporary memory |
| --- | ---: | ---: | ---: |
{rows}

Times are medians of interleaved calls. Memory is what the compiler reports.{of}

"""

MEASURED = """ The figures are for the search in `benchmarks/beam_searches.py`
({program}), with another loop in each line:
[benchmarks](../benchmarks.md#decoding-and-unknown-lengths)."""


def index() -> str:
    return GRID.format(cards="\n\n".join(map(card, entries().values())))


def card(entry: Entry) -> str:
    said = entry.shows[0].upper() + entry.shows[1:]
    return CARD.format(**vars(entry), said=said, kept=kept(entry))


def kept(entry: Entry) -> str:
    """Return the markup that keeps a picture unchanged on dark pages."""
    return "{ .as-drawn }" if entry.coloured else ""


def page(entry: Entry) -> str:
    heading, told = entry.told
    rows = "\n".join(f"| {' | '.join(row)} |" for row in entry.costs)
    of = MEASURED.format(program=entry.measured.partition(": ")[2]) if entry.measured else ""
    within = [path.relative_to(entry.program.parent) for path in entry.beside]
    files = [BESIDE.format(path=path.as_posix()) for path in within if path.name != "__init__.py"]
    made = {
        "kept": kept(entry),
        "heading": heading,
        "told": "\n\n".join(told),
        "guided": GUIDED.format(guide=f"../{entry.guide}") if entry.guide else "",
        "prints": PRINTS.format(name=entry.name) if entry.printed.exists() else "",
        "measured": COSTS.format(rows=rows, of=of) if rows else "",
        "beside": "\n## Other files of the program\n" + "".join(files) if files else "",
    }
    return PAGE.format(**{**vars(entry), **made})
