"""A hook of mkdocs: the gallery's pages and notebooks are made when the site is built."""

from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from entries import entries
from notebooks import notebook
from pages import index, page


def on_config(config: MkDocsConfig) -> None:
    """Fills the gallery's part of the menu."""
    (part,) = (item["Gallery"] for item in config.nav if "Gallery" in item)
    part += [{entry.title: f"gallery/{name}.md"} for name, entry in entries().items()]


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> None:
    def add(path: str, content: str) -> None:
        files.append(File.generated(config, f"gallery/{path}", content=content))

    add("index.md", index())
    for name, entry in entries().items():
        add(f"{name}.md", page(entry))
        add(f"{name}.ipynb", nbformat.writes(notebook(entry)) + "\n")
