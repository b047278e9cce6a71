"""A hook of mkdocs: formulas become MathML, which browsers draw without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_drawn, content)


def _drawn(formula: re.Match[str]) -> str:
    inline = formula[2] == "("
    drawn = convert(html.unescape(formula[3]), display="inline" if inline else "block")
    drawn = re.sub(
        r' (?:min|max)size="[^"]*"', "", drawn
    )  # brackets are as high as what is in them
    return drawn if inline else f'<div class="formula">{drawn}</div>'
