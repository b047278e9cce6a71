"""Prepares docstrings of loopkit.schedules, which are written as plain text, for mkdocstrings.

`Arguments:`, `Returns:` and `Source:` begin paragraphs, `field: what it is` an item of a list, and
doctests are code.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Arguments|Returns|Raises|Source): ", re.MULTILINE)
DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


def as_markdown(text: str, fields: set[str]) -> str:
    text = SECTION.sub(r"\n**\1:** ", text)
    text = re.sub(r"^(\w+): ", lambda m: _item(m, fields), text, flags=re.MULTILINE)
    return DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)


def _item(line: re.Match[str], fields: set[str]) -> str:
    return f"- `{line[1]}`: " if line[1] in fields else line[0]


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring and obj.path.startswith("loopkit.schedules."):
            fields = set(obj.members) if obj.is_class else set()
            obj.docstring.value = as_markdown(obj.docstring.value, fields)
