"""The ys of a scan that are kept, and their types: `every` and `reduce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trials.draws import INTEGERS, Type
from trials.trees import Tree
from trials.writer import Writer

UNSIGNED = frozenset(name for name in INTEGERS if name.startswith("u"))


@dataclass(frozen=True)
class Kept:
    """The reduction of each y, a leaf of a tree."""

    every: int | None
    words: tuple[str | None, ...]

    def options(self, tree: Tree, one_word: bool) -> dict[str, str]:
        """Return the options as text. `one_word`: one word is enough for all leaves."""
        how = {} if self.every is None else {"every": str(self.every)}
        if any(self.words):
            words = [repr(word) for word in self.words]
            how["reduce"] = words[0] if one_word else tree.text(words)
        return how

    def type_of(self, at: int, t: Type, steps: int, axis: int | None) -> Type:
        """Return the type of what the scan returns of a y of type `t`."""
        word = self.words[at]
        kind = replace(t, dtype=reduced(t, word))
        if axis is None or (self.every is None and word is not None):
            return kind
        rows = steps if self.every is None else steps // self.every
        return kind.of(with_rows(t, rows, axis))

    def may_be_last(self, at: int) -> bool:
        """Whether `out_axes` may be None: rows of sums have to have an axis."""
        return self.every is None or self.words[at] in (None, "last")


def all_of(ys: Sequence[Type]) -> Kept:
    return Kept(None, (None,) * len(ys))


def draw_kept(w: Writer, ys: Sequence[Type], steps: int, how: dict[str, str]) -> Kept:
    if not ys or not w.may("some ys", 85):
        return all_of(ys)
    every = w.d.number(1, max(1, steps)) if w.d.chance(60) else None
    words = [word(w, t, every, steps, how) for t in ys]
    if every is not None:
        w.d.note("option: every")
    for name in filter(None, words):
        w.d.note(f"option: reduce='{name}'{'' if every is None else ' of every'}")
    w.tags.update(["some ys"] if every or any(words) else [])
    return Kept(every, tuple(words))


def word(w: Writer, t: Type, every: int | None, steps: int, how: dict[str, str]) -> str | None:
    """Choose the reduction of a window of a y."""
    some = [None, "sum", "mean", "last"] if t.kind != "key" else [None, "last"]
    if t.kind in ("int", "bool") and t.dtype != "int64":
        some.remove("mean")  # of float32, while nothing else in the program is
    if not steps and every is None:  # a mean of nothing is NaN, and of keys there are no zeros
        some = [None, "sum"] if t.kind != "key" else [None]
    if every is None and {"truncate", "until"} <= set(how):
        some = [name for name in some if name != "last"]  # as `out_axes=None`
    return w.d.choice(some)


def reduced(t: Type, word: str | None) -> str:
    """A sum has the dtype of `jnp.sum`, and a mean that of `jnp.mean`."""
    if t.kind not in ("int", "bool") or word not in ("sum", "mean"):
        return t.dtype
    if word == "mean":
        return "float64"
    return "uint64" if t.dtype in UNSIGNED else "int64"


def with_rows(t: Type, rows: int, axis: int) -> tuple[int, ...]:
    shape = list(t.shape)
    shape.insert(axis % (len(shape) + 1), rows)
    return tuple(shape)
