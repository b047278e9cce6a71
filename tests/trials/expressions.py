"""The grammar of a step's arithmetic. Moderate inputs give moderate outputs."""

from __future__ import annotations

from collections.abc import Callable

from trials.draws import KEY, NARROW, Type
from trials.other_kinds import OTHERS
from trials.values import index, integer, predicate, rows_index, value
from trials.writer import Writer

FLOATS: dict[str, tuple[int, Callable[[Writer, Type], str | None]]] = {}
"""The weight of each construct, and the function that writes it: None if the type has none such."""


def construct(name: str, weight: int):
    def add(write):
        FLOATS[name] = weight, write
        return write

    return add


def expression(w: Writer, kind: Type) -> str:
    """A new value of a type."""
    if kind.kind != "float":
        return OTHERS[kind.kind](w, kind)
    if 0 in kind.shape:
        return f"{value(w, kind)} * {w.d.constant()}"
    always = "arithmetic", "function"
    weights = {k: n for k, (n, _) in FLOATS.items() if k in always or k in w.allowed}
    name = w.d.weighted(weights)
    text = FLOATS[name][1](w, kind)
    if text is None:
        name, text = "arithmetic", arithmetic(w, kind)
    w.d.note(name)
    return f"({text}).astype('{kind.dtype}')" if kind.dtype in NARROW else text


@construct("arithmetic", 8)
def arithmetic(w: Writer, t: Type) -> str:
    a, b = value(w, t), value(w, t)
    if t.dtype == "float64" and w.d.chance(12):
        return f"{a} * jnp.cos(jnp.asarray({integer(w)}, 'float64'))"
    ways = "{a} + {b} / 2", "{a} * {b} / 2", "{a} - 0.5 * {b}", "{a} / (1 + {b} * {b})", "{a} * 0.7"
    return w.d.choice(ways).format(a=a, b=b)


@construct("function", 6)
def function(w: Writer, t: Type) -> str:
    a = value(w, t)
    names = "jnp.sin", "jnp.cos", "jnp.tanh", "jnp.arctan", "jax.nn.sigmoid", "jnp.negative"
    some = w.d.choice((*names, "square", "root", "gauss"))
    other = {
        "square": f"{a} ** 2 / 2",
        "root": f"jnp.sqrt(1 + {a} * {a})",
        "gauss": f"jnp.exp(-{a} * {a})",
    }
    return other.get(some) or f"{some}({a})"


@construct("extremum", 2)
def extremum(w: Writer, t: Type) -> str | None:
    if t.rough:
        return None
    a, b = value(w, t), value(w, t)
    way = w.d.choice(("jnp.maximum", "jnp.minimum", "clip", "abs"))
    if way == "clip":
        return f"jnp.clip({a}, -0.5, 0.9)"
    return f"jnp.abs({a})" if way == "abs" else f"{way}({a}, {b})"


@construct("where", 3)
def where(w: Writer, t: Type) -> str:
    a, b = value(w, t), value(w, t)
    if t.shape and not t.rough and w.d.chance(50):
        return f"jnp.where({a} > {w.d.constant()}, {a}, {b})"
    return f"jnp.where({predicate(w)}, {a}, {b})"


@construct("reduction", 4)
def reduction(w: Writer, t: Type) -> str | None:
    if t.shape == ():
        a = value(w, t.of(w.d.choice(((3,), (2, 3), (3, 3)))))
        some = [
            "jnp.sum({}) / 3",
            "jnp.mean({})",
            "jnp.prod(jnp.cos({}))",
            "jnp.linalg.norm(1 + {} ** 2) / 3",
        ]
        some += [] if t.rough else ["jnp.max({})", "jnp.min({})"]
        return w.d.choice(some).format(a)
    if t.shape == (3,):
        a = value(w, t.of((w.d.choice((2, 3)), 3)))
        return w.d.choice(
            (f"jnp.sum({a}, 0) / 2", f"jnp.mean({a}, axis=0)", f"jnp.cumsum({value(w, t)}) / 2")
        )
    return f"jnp.cumsum({value(w, t)}, axis=0) / 2" if w.d.chance(50) else None


@construct("product", 4)
def product(w: Writer, t: Type) -> str | None:
    vector, matrix = t.of((3,)), t.of((3, 3))
    if t.shape == ():
        return f"{value(w, vector)} @ {value(w, vector)} / 3"
    if t.shape == (3,):
        a, x = value(w, matrix), value(w, vector)
        return w.d.choice(
            (f"{a} @ {x} / 3", f"{x} @ {a} / 3", f"jnp.cross({x}, {value(w, vector)}) / 2")
        )
    if t.shape == (3, 3):
        if w.d.chance(50):
            return f"jnp.outer({value(w, vector)}, {value(w, vector)}) / 2"
        return f"jnp.einsum('ij,kj->ik', {value(w, matrix)}, {value(w, matrix)}) / 3"
    return f"{value(w, t)} @ {value(w, matrix)} / 3" if t.shape == (2, 3) else None


@construct("large product", 2)
def large_product(w: Writer, t: Type) -> str | None:
    """Write a product with a matrix whose gradient is better added up at the end."""
    if t.shape != (3,) or t.dtype != "float64":
        return None
    if w.matrix is None:
        return f"from_many(jnp.tanh(to_many({value(w, t)}) @ large({value(w, t)}) / 9))"
    w.d.note("large product with what a loop closes over")
    once = f"jnp.tanh(to_many({value(w, t)}) @ {w.matrix} / 9)"
    return f"from_many({once if w.d.chance(40) else f'jnp.tanh({once} @ {w.matrix} / 30)'})"


@construct("gather", 4)
def gather(w: Writer, t: Type) -> str | None:
    """Rows of something larger, with a mode where an index may be out of bounds."""
    if len(t.shape) > 1:
        return None
    table = t.of((3, *t.shape))
    around = w.having(lambda v: v.type.fits(table) and v.moving and w.is_outside(v))
    if around and w.d.chance(60):
        w.d.note("gather of what a loop closes over")
    else:
        around = []
    a = w.d.choice(around).name if around else value(w, table)
    if t.shape == (3,) and w.d.chance(30):
        return f"{value(w, t)}[{rows_index(w, 3)}].sum() * {value(w, t)} / 3"
    fill = "mode='fill', fill_value="
    mode = w.d.choice(("", "mode='clip'", f"{fill}0.5", f"{fill}0"))
    w.d.note(f"gather {mode}".strip())
    return f"{a}[{index(w, 3)}]" if not mode else f"{a}.at[{index(w, 3)}].get({mode})"


@construct("scatter", 4)
def scatter(w: Writer, t: Type) -> str | None:
    if not t.shape:
        return None
    a, how = value(w, t), w.d.choice(("set", "add", "multiply"))
    if not t.rough and w.d.chance(20):
        how = w.d.choice(("max", "min"))
        w.tags.add("scatter of extrema")
    mode = w.d.choice(("", ", mode='drop'", ", mode='clip'"))
    w.d.note(f"scatter {how}{mode}")
    at = index(w, t.shape[0]) if how != "add" or w.d.chance(60) else rows_index(w, t.shape[0])
    x = value(w, t.of(t.shape[1:])) if len(t.shape) < 3 else "0.5"
    return f"{a}.at[{at}].{how}({x}{mode})"


@construct("dynamic slice", 2)
def dynamic_slice(w: Writer, t: Type) -> str | None:
    if t.shape != (3,):
        return None
    a = value(w, t)
    if w.d.chance(50):
        return (
            f"lax.dynamic_update_slice({a}, jnp.reshape({value(w, t.of(()))}, 1), ({integer(w)},))"
        )
    return f"jnp.tile(lax.dynamic_slice({a}, ({integer(w)},), (1,)), 3)"


@construct("sort", 3)
def sort(w: Writer, t: Type) -> str | None:
    if not t.shape or t.rough:
        return None
    a = value(w, t)
    if t.shape == (3,) and w.d.chance(50):
        return f"{value(w, t)}[jnp.argsort({a})]"
    return f"jnp.sort({a}, axis=0)"


@construct("rearrangement", 3)
def rearrangement(w: Writer, t: Type) -> str | None:
    if not t.shape:
        return None
    a = value(w, t)
    if t.shape == (3, 3):
        return f"{a}.T"
    if t.shape == (3,):
        s = value(w, t.of(()))
        return w.d.choice(
            (f"{a}[::-1]", f"jnp.roll({a}, 1)", f"jnp.concatenate([{a}[1:], {s}[None]])")
        )
    return f"jnp.flip({a}, 0)"


@construct("stop_gradient", 1)
def stop_gradient(w: Writer, t: Type) -> str:
    return f"lax.stop_gradient({value(w, t)}) * {value(w, t)} / 2"


@construct("rule", 4)
def rule(w: Writer, t: Type) -> str:
    """Derivatives of someone's own."""
    a, b = value(w, t), value(w, t)
    if "custom_vjp" in w.allowed and w.d.chance(50):
        w.tags.add("custom_vjp")
        w.d.note("custom_vjp")
        some = [f"thrice({a}, {b})", f"scaled(3, {a})"]
        if not w.lanes:  # of what lanes have in common the cotangent is a sum
            some.append(f"clipped({a})")
        text = w.d.choice(some)
        w.tags.update(["pullback that is not linear"] if "clipped" in text else [])
        return text
    w.d.note("custom_jvp")
    w.tags.add("custom_jvp")
    return w.d.choice((f"wave({a})", f"mixed({a}, {b})", f"looping({a})"))


@construct("function called", 4)
def called(w: Writer, t: Type) -> str:
    """A function in the step, jitted or rematerialised: with constants, and what it closes over."""
    ways = "helper", "jax.jit", "jax.checkpoint", "jax.jit(jax.checkpoint", "captured table"
    way = w.d.choice(ways)
    w.d.note(way)
    a = value(w, t)
    if way == "helper":
        return f"helper({a})"
    if way == "captured table":
        return f"jax.jit(lambda x: x * jnp.cos(TABLE[:3] * jnp.mean(x)).sum() / 3)({a})"
    x, effects = w.name("x"), w.effects
    w.effects = effects and "checkpoint" not in way
    with w.hiding():
        w.add(x, t)
        inner = expression(w, t)
    w.effects = effects
    return f"{way}(lambda {x}: {inner}){')' if way.count('(') else ''}({a})"


@construct("cond", 5)
def cond(w: Writer, t: Type) -> str:
    p = predicate(w)
    if not t.rough and not w.lanes and w.d.chance(25):
        w.tags.add("bad branch")
        w.d.note("NaN in a branch not taken")
        a = value(w, t)
        some = w.d.choice(("jnp.sqrt({})", "jnp.log({})", "{} ** 1.5", "1 / jnp.sqrt({})"))
        s = f"jnp.min({a})" if t.shape else a
        return f"lax.cond({s} > 0.2, lambda a: {some.format('a')}, lambda a: a * 0.5, {a})"
    if w.d.chance(30):
        w.d.note("switch")
        branches = ", ".join(f"lambda: {expression(w, t)}" for _ in range(3))
        return f"lax.switch({integer(w)}, [{branches}])"
    if w.d.chance(50):
        x = w.name("x")
        with w.hiding():
            w.add(x, t)
            one, other = expression(w, t), expression(w, t)
        return f"lax.cond({p}, lambda {x}: {one}, lambda {x}: {other}, {value(w, t)})"
    return f"lax.cond({p}, lambda: {expression(w, t)}, lambda: {expression(w, t)})"


@construct("vmap", 3)
def vmapped(w: Writer, t: Type) -> str | None:
    if t.shape not in ((3,), (2, 3), (3, 3)) or w.lanes:
        return None
    x, y = w.name("x"), w.name("y")
    row = t.of(t.shape[1:])
    before, w.lanes = w.lanes, True
    with w.hiding():
        w.add(x, row)
        w.add(y, row)
        inner = expression(w, row)
    w.lanes = before
    if w.d.chance(30):
        return f"jax.vmap(lambda {x}, {y}: {inner}, (0, None))({value(w, t)}, {value(w, row)})"
    return f"jax.vmap(lambda {x}, {y}: {inner})({value(w, t)}, {value(w, t)})"


@construct("callback", 1)
def callback(w: Writer, t: Type) -> str:
    w.tags.add("callback")
    way = w.d.weighted({"debug.callback": 3, "pure_callback": 3, "io_callback": 2})
    if way == "io_callback" and (w.lanes or not w.effects):
        way = "debug.callback"
    w.d.note(way)
    if way == "debug.callback":
        return f"noted({value(w, t)})"
    if way == "io_callback":
        w.tags.add("io_callback")
        return f"told_to_host({value(w, t)})"
    return f"{value(w, t)} * host_half(lax.stop_gradient({value(w, t)}))"


@construct("random numbers", 2)
def random_numbers(w: Writer, t: Type) -> str:
    key = f"jax.random.fold_in({value(w, KEY)}, {integer(w)})"
    draw = f"jax.random.normal({key}, {t.shape}, 'float64')"
    return f"{value(w, t)} + ({draw} / 9).astype('{t.dtype}')"


@construct("parts of complex numbers", 2)
def parts(w: Writer, t: Type) -> str | None:
    if t.dtype != "float64":
        return None
    z = value(w, Type("complex128", t.shape, t.rough))
    return w.d.choice((f"jnp.real({z})", f"jnp.imag({z})", f"jnp.real({z} * jnp.conj({z})) / 2"))


@construct("infinite slope beyond the last step", 4)
def at_the_end(w: Writer, t: Type) -> str | None:
    """A root that has no derivative where the loop around has ended."""
    left = w.having(lambda v: v.name.startswith("left"))
    if not left or t.rough:
        return None
    a = value(w, t)
    return f"jnp.sqrt({left[0].name} * (1 + {a} * {a})) / 2"


FREE = frozenset(FLOATS) - {"arithmetic", "function"} | {"custom_vjp"}
"""Constructs that a program has or has not: of those drawn there are more then."""
