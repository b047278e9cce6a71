"""The style of the pictures of the pages. Each is drawn twice, for light pages and for dark
ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
INK = {"light": "#2b2f36", "dark": "#dfe3ea"}
BLUE, ORANGE, RED, GREY = "#3f7fdb", "#e08a1e", "#d6453d", "#8b919b"
"""Each is seen on white and on the dark of the pages."""


def save(pictures: Callable[[str], Iterator[tuple[str, Any, dict]]]) -> None:
    """Each of `pictures(ink)`, a name, a figure and what the file says of itself."""
    for scheme, ink in INK.items():
        colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        settings = dict.fromkeys(colours, ink) | {"svg.hashsalt": "loopkit", "font.size": 10}
        settings |= {"axes.spines.top": False, "axes.spines.right": False}
        with plt.rc_context(settings):
            for name, figure, says in pictures(ink):
                path = HERE / f"{name}-{scheme}.svg"
                figure.savefig(path, metadata={"Date": None, **says}, transparent=True)
                plt.close(figure)
