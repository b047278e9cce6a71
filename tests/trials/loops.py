"""Loops that end when they like, or after a number of steps; and which of all is written."""

from __future__ import annotations

from dataclasses import replace

from trials import options
from trials.draws import INT
from trials.expressions import expression
from trials.lax_loops import lax_loop
from trials.layers import layers
from trials.scans import scan
from trials.steps import (
    Carry,
    again,
    before_end,
    draw_carry,
    draw_limit,
    ended,
    most_trips,
    step,
    told,
    unpacked,
    within,
)
from trials.values import predicate, scalar, value
from trials.writer import Writer


def loop(w: Writer) -> None:
    kinds = {"scan": 5, "while": 4, "fori": 3, "lax": 2}
    kinds |= {"in lanes": 2} if not w.lanes and w.may("lanes", 60) else {}
    kinds |= {"layers": 3} if "layers" in w.allowed else {}
    kind = w.d.weighted(kinds)
    w.d.note(f"loop: {kind}")
    LOOPS[kind](w)


LANES = "jnp.arange(3, dtype='int32')", "jnp.array([2, 0, 3], 'int32')"
LANES_OF_LANES = (
    "jnp.array([[2, 0], [1, 3]], 'int32')",
    "jnp.array([[0, 1], [2, 3]], 'int32')",
)


def in_lanes(w: Writer) -> None:
    """Write a function with a loop, for three values at once, each of which may stop early."""
    before, allowed = w.variables, w.allowed
    w.variables = [v for v in before if not v.buffer]  # of a step around, not of one lane
    lane, x, k = w.name("lane"), w.name("x"), w.name("k")
    row, twice = w.some_float(((), (3,))), w.d.chance(30)
    counts, given = (2, 2) if twice else (3,), w.d.choice(LANES_OF_LANES if twice else LANES)
    w.d.note("lanes of lanes" if twice else "lanes of a program's own")
    at, w.lanes, w.trips = value(w, row.of((*counts, *row.shape))), True, w.trips * 3
    with w.function(f"{lane}({x}, {k})"):
        w.add(x, row)
        w.add(k, INT)
        w.loop(w)
        result = replace(row, rough=row.rough or len(w.dtypes) > 1)
        w.line(f"return {expression(w, result)}")
    w.lanes, w.trips, w.allowed = False, w.trips // 3, allowed
    w.variables = before
    mapped = f"jax.vmap(jax.vmap({lane}))" if twice else f"jax.vmap({lane})"
    w.let(f"{mapped}({at}, {given})", result.of((*counts, *row.shape)))


def while_loop(w: Writer) -> None:
    most = most_trips(w)
    by_floats = w.d.chance(15)
    limit = draw_limit(w, most)
    w.d.note(f"counter: {'float' if by_floats else 'int'}")
    if not limit.isdigit():
        limit = w.let(limit, INT, prefix="n").name
    carry = draw_carry(w, "0.0" if by_floats else "0")
    body, goes_on = w.name("body"), w.name("goes_on")
    with w.function(f"{goes_on}(c)"):
        now = unpacked(w, carry, "c")
        i = now[carry.counter].name
        form = w.d.choice(
            (
                "{i} < {n}",
                "~({i} >= {n})",
                "{n} > {i}",
                "{i} <= {n} - 1",
                "jnp.logical_and({i} < {n}, {p})",
                "({i} < {n}) & ~{q}",
            )
        )
        w.d.note(f"predicate: {form}")
        p, q = predicate(w), f"({scalar(w)} > 2.5)"
        w.line(f"return {form.format(i=i, n=limit, p=p, q=q)}")
    with within(w, most), w.function(f"{body}(c)"):
        w.limit = limit
        add = "1.0" if by_floats else "1"
        count = f"{{}} + {add}"
        if w.d.chance(10):
            w.d.note("a counter that an inner loop moves")
            count = "loops.fori_loop(0, 2, lambda _, i: i + 1, {})"
        w.line(f"return {step(w, carry, 'c', count.format)}")
    bound = options.bounded(w, most, throws=True)
    how = bound | options.kept(w, bool(bound)) | options.unrolled(w, False) | carry.named()
    how |= options.narrowed(w)
    how |= options.watched(w, how.get("lanes"), carry.checked)
    if not bound:
        w.tags.add("no bound")
        w.d.note("no bound")
    w.tags.add("while")
    finished(w, carry, f"loops.while_loop({goes_on}, {body}, {carry.init}@)", how, body)


def fori_loop(w: Writer) -> None:
    most = most_trips(w)
    lower, upper = w.d.choice(("0", "1", "-1")), draw_limit(w, most)
    known = upper.isdigit()
    carry = draw_carry(w)
    if not known:
        w.tags.add("while")
        upper = w.let(upper, INT, prefix="n").name
    body, i = w.name("body"), w.name("i")
    with within(w, most + (lower == "-1")), w.function(f"{body}({i}, c)"):
        counter, w.counter = w.add(i, INT), i
        before_end(w, counter, upper)
        w.line(f"return {step(w, carry, 'c')}")
    bound = options.bounded(w, most + (lower == "-1"))
    if not (bound or known):
        w.tags.add("no bound")
        w.d.note("no bound")
    how = bound | options.kept(w, known or bool(bound)) | options.unrolled(w, known)
    how |= options.narrowed(w)
    how |= options.watched(w, how.get("lanes"), carry.checked)
    call = f"loops.fori_loop({lower}, {upper}, {body}, {carry.init}@)"
    finished(w, carry, call, how | carry.named(), body)


def finished(w: Writer, carry: Carry, call: str, how: dict[str, str], body: str) -> None:
    """The call, and what it returns by name."""
    how |= options.flag(w, "return_info", 20, "return_info")
    options.noted_together(w, call, how, body)
    out = w.name("out")
    w.line(f"{out} = {call.replace('@', options.text_of(how))}")
    if "return_info" in how:
        told(w, f"{out}[1]")
        w.line(f"{out} = {out}[0]")
    ended(w, carry, out)
    if w.may("again", 20):
        twin = again(w, call, body)
        other = {k: v for k, v in how.items() if k != "throw"}
        if twin == call and "max_steps" in how:
            other["max_steps"] = "1"
            w.tags.add("max_steps")
        finished(w, carry, twin, other, body)


LOOPS = {
    "scan": scan,
    "while": while_loop,
    "fori": fori_loop,
    "lax": lax_loop,
    "in lanes": in_lanes,
    "layers": layers,
}
