"""Scans: inputs, outputs, and their axes."""

from __future__ import annotations

from dataclasses import replace

from trials import options
from trials.draws import FLOAT, Type
from trials.expressions import expression
from trials.some_ys import Kept, draw_kept, with_rows
from trials.steps import (
    Carry,
    again,
    draw_carry,
    ended,
    leaf_type,
    most_trips,
    step,
    told,
    trips,
    unpacked,
    within,
)
from trials.trees import Tree, draw_tree
from trials.values import predicate, value
from trials.writer import Writer


def scan(w: Writer) -> None:
    most = trips(w, most_trips(w))
    w.d.note(f"scan of {most} steps")
    carry = draw_carry(w)
    xs, axes = inputs(w, most)
    body, y_tree, ys = w.name("body"), Tree(), []
    with within(w, most), w.function(f"{body}(c, x)"):
        since = len(w.lines)
        for (_, t, tree_path), axis in zip(xs[1], axes, strict=True):
            row = t if axis is not None else t.of(with_rows(t, most, 0))
            w.let(tree_path, row, moving=t.inexact)
        new = step(w, carry, "c", inputs=since)
        ys = [leaf_type(w) for _ in range(w.d.number(0, 2))]
        if w.allowed & {"until", "axes"}:  # of keys there are no zeros
            ys = [t if t.kind != "key" else FLOAT for t in ys]
        w.d.counts.update(f"output: {t.kind}" for t in ys)
        values = [w.let(expression(w, t), t).name for t in ys]
        y_tree = draw_tree(w.d, len(ys)) if ys else Tree()
        w.line(f"return {new}, {y_tree.text(values) if ys else None}")
    how = scan_options(w, carry, most, axes, xs)
    kept = draw_kept(w, ys, most, how)
    some = kept.options(y_tree, len(set(kept.words)) == 1 and w.d.chance(50))
    if some:
        how.pop("_split_transpose", None)  # lax has no such scan
    how |= some
    out_axes = stacked_along(w, ys, how, kept)
    how |= {} if out_axes is None else {"out_axes": y_tree.text([str(a) for a in out_axes])}
    how |= options.flag(w, "return_info", 20, "return_info")
    call = f"loops.scan({body}, {carry.init}, {xs[0]}, {most}@)"
    options.noted_together(w, call, how, body)
    along = out_axes or [0] * len(ys)
    made = [kept.type_of(i, t, most, along[i]) for i, t in enumerate(ys)]
    moving = [t.inexact for t in ys]
    scanned(w, carry, call, how, (y_tree, made, moving))
    if w.may("again", 20):
        twin = again(w, call, body)
        other = how
        if twin == call:
            other = how | {"reverse": str("reverse" not in how)} | options.unrolled(w, True)
            w.tags.add("reverse")
        scanned(w, carry, twin, other, (y_tree, made, moving))


def scanned(w: Writer, carry: Carry, call: str, how: dict[str, str], rows: tuple) -> None:
    """The call of a scan, and what it returns. `rows`: the tree of ys, their types, which move."""
    out, ys, info = w.name("out"), w.name("ys"), "info" if "return_info" in how else ""
    text = call.replace("@", options.text_of(how))
    w.line(f"{', '.join([out, ys, *([info] if info else [])])} = {text}")
    if info:
        told(w, info)
    ended(w, carry, out)
    tree, made, moving = rows
    for path, t, moves in zip(tree.paths(ys), made, moving, strict=False):
        if t.dtype == "uint64":  # with other integers it makes a float
            path, t = f"{path}.astype('int64')", replace(t, dtype="int64")
        w.let(path, t, moving=moves)


def inputs(w: Writer, most: int) -> tuple:
    """(text, leaves of (array, type of a row, path)), and the axis of each."""
    leaves, axes = [], []
    for _ in range(w.d.number(0, 2)):
        t = leaf_type(w)
        t = t if 0 not in t.shape and t.kind != "bool" else FLOAT
        axis = 0
        if t.shape and w.may("axes", 60):
            axis = w.d.choice((1, -1, None))
        made = f"rows({most}, {value(w, t)}, {axis or 0})"
        w.d.note(f"input: {t.kind}")
        name = w.let(made, t.of(with_rows(t, most, axis or 0))).name
        leaves.append((name, t))
        axes.append(axis)
    if not leaves:
        return ("None", []), []
    tree = draw_tree(w.d, len(leaves))
    paths = tree.paths("x")
    full = [(name, t, path) for (name, t), path in zip(leaves, paths, strict=True)]
    text = tree.text([name for name, _ in leaves])
    return (text, full, tree), axes


def scan_options(w: Writer, carry: Carry, most: int, axes: list, xs: tuple) -> dict[str, str]:
    how: dict[str, str] = {}
    if any(a != 0 for a in axes):
        w.tags.add("axes")
        w.d.note("option: in_axes")
        how["in_axes"] = xs[2].text([str(a) for a in axes])
    if w.may("options", 25):
        w.d.note("option: reverse")
        w.tags.add("reverse")
        how["reverse"] = "True"
    if most > 1 and w.may("truncate", 60):
        w.d.note("option: truncate")
        w.tags.add("truncate")
        how["truncate"] = str(w.d.number(1, most))
    if w.may("until", 60):
        w.d.note("option: until")
        w.tags.add("until")
        stop = w.name("stop")
        with w.function(f"{stop}(c, y)"):
            unpacked(w, carry, "c")
            w.line(f"return {predicate(w)}")
        how["until"] = stop
    how |= options.kept(w, True, "truncate" not in how) | options.unrolled(w, True)
    how |= options.watched(w, None, carry.checked)
    asked = {"checkpoints", "memory", "until", "truncate", "in_axes", "progress"} & set(how)
    if not asked and "axes" not in w.allowed and not any(v.buffer for v in carry.initial):
        how |= options.flag(w, "_split_transpose", 20)
    lanes = options.narrowed(w)
    if lanes.get("lanes") == "'flatten'":  # whose steps none could show
        how.pop("progress", None)
    return how | carry.named() | lanes


def stacked_along(w: Writer, ys: list[Type], how: dict[str, str], kept: Kept) -> list | None:
    if not ys or not w.may("axes", 60):
        return None
    w.tags.add("axes")
    w.d.note("option: out_axes")
    last = [None] if "truncate" not in how or "until" not in how else []
    able = [last if kept.may_be_last(i) else [] for i in range(len(ys))]
    ways = [(0, *([1, -1] if t.shape else []), *none) for t, none in zip(ys, able, strict=True)]
    return [w.d.choice(some) for some in ways]
