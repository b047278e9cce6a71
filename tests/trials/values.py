"""A value of a given type: a variable, something made of one, or a constant."""

from __future__ import annotations

from dataclasses import replace

from trials.draws import FLOAT, Type
from trials.writer import Writer


def value(w: Writer, kind: Type) -> str:
    """Write a value that is at hand; the simplest come first."""
    same = w.having(lambda v: v.type.fits(kind))
    still = kind.inexact and not any(v.moving for v in same)
    if same and not w.d.chance(75 if still else 12):
        return w.pick(same).name
    if kind.kind == "key":
        return f"jax.random.key({w.d.number(0, 9)})"
    if kind.inexact:
        return converted(w, kind)
    return same[0].name if same else constant(w, kind)


def constant(w: Writer, kind: Type) -> str:
    if kind.kind == "bool":
        return f"jnp.full({kind.shape}, {w.d.chance(50)})"
    if kind.kind == "int":
        return f"jnp.full({kind.shape}, {w.d.number(0, 3)}, '{kind.dtype}')"
    if len(kind.shape) == 1 and w.d.chance(50):
        w.d.note("constant array")
        return f"jnp.asarray(TABLE[:{kind.shape[0]}], '{kind.dtype}')"
    return f"jnp.full({kind.shape}, {w.d.constant()}, '{kind.dtype}')"


def converted(w: Writer, kind: Type) -> str:
    """Convert a value of another dtype or shape."""
    ok = lambda v: kind.rough or not v.type.rough
    real = ("float", "int", "bool") if kind.kind == "float" else ("float", "complex")
    casts = w.having(lambda v: v.type.shape == kind.shape and v.type.kind in real and ok(v))
    scalars = w.having(lambda v: v.type.shape == () and v.type.kind == kind.kind and ok(v))
    full_or_scalar = lambda v: 0 not in v.type.shape
    full = lambda v: v.type.shape and full_or_scalar(v)
    arrays = w.having(lambda v: v.type.kind == kind.kind and full(v) and ok(v))
    ways = {"cast": 4 * bool(casts), "scalar": 3 * bool(scalars and kind.shape)}
    others = w.having(
        lambda v: v.type.kind == kind.kind and v.moving and full_or_scalar(v) and ok(v)
    )
    ways |= {"array": 1 * bool(arrays and not kind.shape), "constant": 0}
    ways |= {"fit": 8 * bool(others and 0 not in kind.shape)}
    ways["constant"] = 1 if not any(ways.values()) or w.d.chance(5) else 0
    way = w.d.weighted(ways)
    if way == "cast":
        w.d.note("cast")
        found = w.pick(casts)
        scale = " / 4" if found.type.kind == "int" else ""
        return f"({found.name}{scale}).astype('{kind.dtype}')"
    if way == "scalar":
        scalar = w.pick(scalars).name
        if len(kind.shape) == 1 and 0 < kind.shape[0] <= 4 and w.d.chance(70):
            return f"({scalar} * TABLE[:{kind.shape[0]}]).astype('{kind.dtype}')"
        return f"jnp.full({kind.shape}, {scalar}, '{kind.dtype}')"
    if way == "fit":
        w.d.note("value in another shape")
        return f"fit({w.pick(others).name}, {kind.shape}, '{kind.dtype}')"
    if way == "array":
        found = w.pick(arrays)
        first = ", ".join(str(w.d.number(0, n - 1)) for n in found.type.shape)
        return f"{found.name}[{first}].astype('{kind.dtype}')"
    return constant(w, kind)


def scalar(w: Writer, rough: bool = False) -> str:
    return value(w, replace(FLOAT, rough=rough))


def integer(w: Writer) -> str:
    """An integer scalar of whatever type."""
    found = w.having(lambda v: v.type.kind == "int" and v.type.shape == ())
    return w.pick(found).name if found and w.d.chance(90) else str(w.d.number(0, 3))


def index(w: Writer, rows: int) -> str:
    """Write the index of a row, which is out of bounds at times."""
    way = w.d.weighted(
        {"plain": 5, "wrapped": 4, "fixed": 2, "shifted": 2, "negative": 1, "data": 2}
    )
    w.d.note(f"index: {way}")
    at = integer(w)
    if way == "fixed":
        return str(w.d.number(-rows, rows - 1))
    if way == "shifted":
        return f"{at} {w.d.choice(('-', '+'))} {w.d.number(1, 3)}"
    if way == "negative":
        return f"-1 - {at}"
    if way == "data":
        return f"whole({scalar(w)}, {rows})"
    return f"{at} % {rows}" if way == "wrapped" else at


def rows_index(w: Writer, rows: int) -> str:
    """Several of them; one twice at times."""
    if w.d.chance(50):
        return f"jnp.array({[w.d.number(0, rows - 1) for _ in range(w.d.number(1, 3))]})"
    return f"(jnp.arange({w.d.number(1, 3)}) + {integer(w)}) % {rows}"


def predicate(w: Writer) -> str:
    way = w.d.weighted({"number": 4, "integer": 3, "given": 2, "any": 1, "and": 1})
    if way == "given":
        found = w.having(lambda v: v.type.kind == "bool" and v.type.shape == ())
        if found:
            return w.pick(found).name
    if way == "integer":
        return f"({integer(w)} % 2 == {w.d.number(0, 1)})"
    if way == "any":
        return f"jnp.any({value(w, FLOAT.of((3,)))} > {w.d.constant()})"
    if way == "and":
        return f"(({scalar(w)} < 1.1) & ({integer(w)} < 2))"
    return f"({scalar(w)} > {scalar(w)})" if w.d.chance(30) else f"({scalar(w)} > {w.d.constant()})"
