"""Trees of values, as text: what makes one of its leaves, and what finds a leaf in it."""

from __future__ import annotations

from dataclasses import dataclass

from trials.draws import Draws

SHAPES = {
    # How a node is written around its children, and how each of them is read.
    "tuple": ("({0},)", "({0}, {1})", ("[0]", "[1]")),
    "list": ("[{0}]", "[{0}, {1}]", ("[0]", "[1]")),
    "dict": ("{{'a': {0}}}", "{{'a': {0}, 'b': {1}}}", ("['a']", "['b']")),
    "named tuple": ("Two({0}, None)", "Two({0}, {1})", (".one", ".two")),
    "module": ("Pair({0}, None)", "Pair({0}, {1})", (".first", ".second")),
    "with None": ("(None, {0})", "({0}, (), {1})", ("[0]", "[2]")),
}


@dataclass(frozen=True)
class Tree:
    """Of so many leaves, in order."""

    node: str | None = None
    children: tuple[Tree, ...] = ()

    @property
    def size(self) -> int:
        return 1 if self.node is None else sum(child.size for child in self.children)

    def text(self, leaves: list[str]) -> str:
        if self.node is None:
            return leaves[0]
        parts, at = [], 0
        for child in self.children:
            parts.append(child.text(leaves[at : at + child.size]))
            at += child.size
        return SHAPES[self.node][len(parts) - 1].format(*parts)

    def paths(self, base: str) -> list[str]:
        """Where in `base` each leaf is."""
        if self.node is None:
            return [base]
        ways = SHAPES[self.node][2]
        if len(self.children) == 1 and self.node == "with None":
            ways = ("[1]",)
        pairs = zip(self.children, ways, strict=False)
        return [path for child, way in pairs for path in child.paths(base + way)]


def draw_tree(d: Draws, size: int) -> Tree:
    """Of `size` leaves, one or more."""
    if size == 1:
        return Tree() if not d.chance(15) else _node(d, (Tree(),))
    left = d.number(1, size - 1)
    return _node(d, (draw_tree(d, left), draw_tree(d, size - left)))


def _node(d: Draws, children: tuple[Tree, ...]) -> Tree:
    node = "tuple" if d.chance(40) else d.choice(tuple(SHAPES))
    d.note(f"tree: {node}")
    return Tree(node, children)
