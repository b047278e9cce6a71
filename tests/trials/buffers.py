"""Buffers and lists in a step: reads and writes of all kinds, at random places."""

from __future__ import annotations

import math
from dataclasses import replace

from trials.draws import FLOAT, INT, Type
from trials.values import index, integer, predicate, rows_index, value
from trials.writer import Variable, Writer, names_in

ROOM = 64
"""The capacity of a list: more than is ever appended."""


def new_buffer(w: Writer, checked: bool = False) -> Variable:
    """An array that the next loop carries as a buffer. `checked`: none of its rows is empty."""
    rows = w.d.weighted({4: 5, 2: 3, 40: 3})  # of large ones, what steps displace is logged
    w.d.note(f"buffer of {rows} rows")
    shape = (rows, *w.d.choice(((), (3,), (2, 3), (3, 3))))
    kind = (INT if w.d.chance(10) else w.some_float()).of(shape)
    w.d.note("buffer")
    w.tags.add("buffers")
    text = value(w, kind) if checked or w.d.chance(70) else f"jnp.zeros({shape}, '{kind.dtype}')"
    if checked:
        w.tags.add("checks")
        text = f"1 + ({text}) ** 2"
    made = w.let(text, kind)
    return replace(made, buffer="new buffer")


def empty_list(w: Writer) -> Variable:
    """A TensorArray, of scalars or rows."""
    element = FLOAT.of(w.d.choice(((), (3,))))
    w.d.note("TensorArray")
    w.tags.add("list")
    like = f"jnp.zeros({element.shape})"
    made = w.let(f"loopkit.TensorArray.empty({ROOM}, {like})", element, "new list", "b")
    w.variables.pop()  # it is a value of the loop's, not of what stands around it
    return replace(made, type=element.of((ROOM, *element.shape)))


def place(w: Writer, b: Variable) -> str:
    """Write the place of a row: often one that was read or written before."""
    rows, known = b.type.shape[0], w.places.setdefault((b.origin or b.name, w.checked), [])
    visible = {v.name for v in w.variables}
    again = [text for text in known if visible.issuperset(names_in(text))]
    if again and w.d.chance(40):
        w.d.note("a row again")
        return w.d.choice(again)
    if w.counter is not None and w.d.chance(25):
        w.d.note("a row of each step")
        known.append(f"({w.counter} * {w.d.choice((1, 3, 7))}) % {rows}")
        return known[-1]
    known.append(f"{integer(w)} % {rows}" if w.checked else index(w, rows))
    return known[-1]


def store(w: Writer) -> None:
    """A line that reads or writes one of them."""
    b = w.pick(w.buffers())
    if b.buffer == "list":
        list_line(w, b)
    elif w.counter is not None and w.d.chance(40 if b.type.shape[0] == 40 else 15):
        delayed(w, b)
    elif w.d.chance(45):
        read(w, b)
    else:
        written(w, b, write_text(w, b))


def delayed(w: Writer, b: Variable) -> None:
    """A step reads a row that was written some steps ago, and writes one that is read later."""
    row, rows = b.type.of(b.type.shape[1:]), b.type.shape[0]
    w.d.note(f"delay in a {'large ' if math.prod(b.type.shape) >= 240 else ''}buffer")
    ring = w.d.choice((2, 3, rows)) if rows > 3 else rows
    v = w.let(f"{b.name}[({w.counter} + {w.d.number(1, 2)}) % {ring}]", row)
    made = f"({v.name} / (1 + {v.name} * {v.name}) + {value(w, row)}).astype('{row.dtype}')"
    written(w, b, f"{b.name}.at[{w.counter} % {ring}].set({made})")


def written(w: Writer, b: Variable, text: str) -> None:
    if w.d.chance(15 if b.buffer == "buffer" else 35):
        w.d.note(f"{'write' if b.buffer == 'buffer' else 'TensorArray'} under cond")
        text = f"lax.cond({predicate(w)}, lambda: {text}, lambda: {b.name})"
    new = w.let(text, b.type, b.buffer, "b")
    w.variables[-1] = replace(new, origin=b.origin or b.name)
    if not w.d.chance(15):  # else it may be read as it was, too
        w.variables = [v for v in w.variables if v.name != b.name]


def read(w: Writer, b: Variable) -> None:
    row = b.type.of(b.type.shape[1:])
    way = w.d.weighted({"row": 6, "mode": 2, "rows": 2, "slice": 1, "part": 2, "all": 1})
    w.d.note(f"buffer read: {way}")
    at, total = place(w, b), f".sum(0).astype('{row.dtype}')"
    if way == "row":
        w.let(f"{b.name}[{at}]", row)
    elif way == "mode":
        mode = w.d.choice(("mode='clip'", "mode='fill', fill_value=2"))
        w.let(f"{b.name}.at[{at}].get({mode})", row)
    elif way == "rows":
        w.let(f"{b.name}[{rows_index(w, b.type.shape[0])}]{total}", row)
    elif way == "slice":
        w.let(f"{b.name}[1:3]{total}", row)
    elif way == "part" and row.shape:
        w.let(f"{b.name}[{at}, ..., {w.d.number(0, 2)}]", row.of(row.shape[:-1]))
    else:
        w.let(f"jnp.asarray({b.name}){total}", row)


def write_text(w: Writer, b: Variable) -> str:
    row = b.type.of(b.type.shape[1:])
    at, x = place(w, b), value(w, row)
    how = w.d.weighted({"set": 6, "add": 4, "multiply": 2, "subtract": 1, "max": 1, "power": 0})
    if b.type.rough or b.type.kind != "float":
        how = "set" if how == "max" else how
    way = w.d.weighted({"row": 6, "pred": 3, "rows": 2, "part": 2, "mode": 4, "apply": 1})
    w.d.note(f"buffer write: {how} {way}")
    if way == "pred":
        return f"write({b.name}, '{how}', {at}, {x}, {predicate(w)})"
    if way == "rows" and how in ("set", "add"):
        rows = rows_index(w, b.type.shape[0])
        return f"{b.name}.at[{rows}].{how}(several({x}, {rows}))"
    if way == "part" and row.shape:
        part = value(w, row.of(row.shape[:-1]))
        return f"{b.name}.at[{at}, ..., {w.d.number(0, 2)}].{how}({part})"
    if way == "mode":
        mode, rows = w.d.choice(("drop", "clip")), b.type.shape[0]
        counters = [v.name for v in w.having(lambda v: v.name[0] == "i")]
        if counters and not w.checked and w.d.chance(50):  # of the loop at hand first
            at = f"{counters[0]} + {w.d.number(0, 3)}"
        beyond = " beyond the end" if at[0] == "i" and " + " in at and rows < 5 else ""
        w.d.note(f"buffer write: {how} mode {mode}{beyond}")
        return f"{b.name}.at[{at}].{how}({x}, mode='{mode}')"
    if way == "apply" and b.type.kind == "float":
        return f"sine_at({b.name}, {at})"
    return f"{b.name}.at[{at}].{how}({x})"


def list_line(w: Writer, b: Variable) -> None:
    element = Type("float64", b.type.shape[1:])
    way = w.d.weighted({"append": 5, "write": 3, "read": 4})
    w.d.note(f"TensorArray: {way}")
    if way == "append":
        written(w, b, f"{b.name}.append({value(w, element)})")
    elif way == "write":
        written(w, b, f"{b.name}.write({integer(w)} % 5, {value(w, element)})")
    else:
        w.let(f"{b.name}.read({integer(w)} % 5)", element)
