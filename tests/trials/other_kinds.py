"""Values of a step that are no floats: complex numbers, integers, truth values, keys."""

from __future__ import annotations

from dataclasses import replace

from trials.draws import FLOAT, KEY, Type
from trials.values import predicate, scalar, value
from trials.writer import Writer


def complex_number(w: Writer, t: Type) -> str:
    z, other = value(w, t), value(w, t)
    real = Type({"complex64": "float32"}.get(t.dtype, "float64"), t.shape, t.rough)
    a, b = value(w, real), value(w, real)
    return w.d.choice(
        (
            f"{z} * {other} / 2",
            f"lax.complex({a}, {b})",
            f"{z} * jnp.exp(1j * {a}).astype('{t.dtype}')",
            f"jnp.conj({z}) + {other} / 2",
            f"{z} / (1 + jnp.abs({other}) ** 2)",
            f"jnp.where({predicate(w)}, {z}, {other})",
        )
    )


def whole_number(w: Writer, t: Type) -> str:
    a = value(w, t)
    if t.shape:
        return f"{a} + 1"
    some = w.d.choice(
        (
            "{a} + 1",
            "{a} - 1",
            "({a} * 3 + 1) % 5",
            "jnp.argmax({v})",
            "jnp.sum({v} > 0.1)",
            "whole({s}, 4)",
            "jnp.where({p}, {a}, {a} + 2)",
            "({a} ^ 1)",
            "lax.while_loop(lambda n: n < 3, lambda n: n + 1, {a})",
        )
    )
    if "while" in some:
        w.d.note("lax.while_loop inside, of integers")
    text = some.format(a=a, v=value(w, FLOAT.of((3,))), s=scalar(w), p=predicate(w))
    return f"jnp.asarray({text}).astype('{t.dtype}')"


def truth(w: Writer, t: Type) -> str:
    if t.shape:
        return f"~{value(w, t)}"
    return w.d.choice(
        (predicate(w), f"~jnp.asarray({predicate(w)})", f"({predicate(w)} ^ {value(w, t)})")
    )


def new_key(w: Writer, t: Type) -> str:
    return f"jax.random.split({value(w, replace(KEY))})[{w.d.number(0, 1)}]"


OTHERS = {"complex": complex_number, "int": whole_number, "bool": truth, "key": new_key}
