"""Trees of values, as text: what makes one of its leaves, and what finds a leaf in it."""

from __future__ import annotations

from dataclasses import dataclass

from trials.draws import Draws

SHAPES = {
    # How a node is written around one child or two, and how each of them is read.
    "tuple": (("({0},)", ("[0]",)), ("({0}, {1})", ("[0]", "[1]"))),
    "list": (("[{0}]", ("[0]",)), ("[{0}, {1}]", ("[0]", "[1]"))),
    "dict": (("{{'a': {0}}}", ("['a']",)), ("{{'a': {0}, 'b': {1}}}", ("['a']", "['b']"))),
    "named tuple": (("Two({0}, None)", (".one",)), ("Two({0}, {1})", (".one", ".two"))),
    "module": (("Pair({0}, None)", (".first",)), ("Pair({0}, {1})", (".first", ".second"))),
    "with None": (("(None, {0})", ("[1]",)), ("({0}, (), {1})", ("[0]", "[2]"))),
}
STATIC = {
    "with a function": (("(jnp.tanh, {0})", ("[1]",)), ("(jnp.cos, {0}, {1})", ("[1]", "[2]"))),
    "model": (
        ("Model({0}, jnp.sin, 'cell')", (".weights",)),
        ("Model(({0}, {1}), jnp.sin, 'cell')", (".weights[0]", ".weights[1]")),
    ),
}
"""Nodes with leaves that are not arrays."""
FUNCTIONS = {"with a function": "[0]", "model": ".function"}
"""The place of the function in a tree that has one."""


@dataclass(frozen=True)
class Tree:
    """A tree of some leaves, in order."""

    node: str | None = None
    children: tuple[Tree, ...] = ()

    @property
    def size(self) -> int:
        return 1 if self.node is None else sum(child.size for child in self.children)

    @property
    def shape(self) -> tuple[str, tuple[str, ...]]:
        """Return the text of a node, and the way to each child."""
        assert self.node is not None, "a leaf"
        return (SHAPES | STATIC)[self.node][len(self.children) - 1]

    def text(self, leaves: list[str]) -> str:
        if self.node is None:
            return leaves[0]
        parts, at = [], 0
        for child in self.children:
            parts.append(child.text(leaves[at : at + child.size]))
            at += child.size
        return self.shape[0].format(*parts)

    def paths(self, base: str) -> list[str]:
        """Return the path of each leaf in `base`."""
        return [base] if self.node is None else self._of_children(base, Tree.paths)

    def functions(self, base: str) -> list[str]:
        """Return the paths of the functions in `base`."""
        if self.node is None:
            return []
        own = [base + FUNCTIONS[self.node]] if self.node in FUNCTIONS else []
        return own + self._of_children(base, Tree.functions)

    def _of_children(self, base: str, places) -> list[str]:
        pairs = zip(self.children, self.shape[1], strict=True)
        return [place for child, way in pairs for place in places(child, base + way)]


def draw_tree(d: Draws, size: int, static: bool = False) -> Tree:
    """Draw a tree of `size` leaves, one or more. `static`: with others that are not arrays."""
    if size == 1:
        return Tree() if not d.chance(15) else _node(d, (Tree(),), static)
    left = d.number(1, size - 1)
    return _node(d, (draw_tree(d, left, static), draw_tree(d, size - left, static)), static)


def _node(d: Draws, children: tuple[Tree, ...], static: bool) -> Tree:
    node = "tuple" if d.chance(40) else d.choice(tuple(SHAPES))
    node = d.choice(tuple(STATIC)) if static and d.chance(50) else node
    d.note(f"tree: {node}")
    return Tree(node, children)
