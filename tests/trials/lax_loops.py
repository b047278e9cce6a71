"""Loops of lax, which nobody is asked to replace but those that end when they like."""

from __future__ import annotations

from trials.draws import INT
from trials.steps import Carry, draw_carry, draw_limit, ended, most_trips, step, trips, within
from trials.writer import Writer


def lax_loop(w: Writer) -> None:
    allowed, w.allowed = w.allowed, w.allowed - {"buffer", "list", "static leaves"}
    before, w.variables = w.variables, [v for v in w.variables if not v.buffer]
    kinds = {"scan": 6, "fori": 3} | ({"while": 4} if "loop of lax: while" in allowed else {})
    kind = w.d.weighted(kinds)
    w.d.note(f"loop of lax: {kind}")
    most = most_trips(w)
    limit = draw_limit(w, most) if kind == "while" else str(trips(w, most))
    carry, body, out = draw_carry(w), w.name("body"), w.name("out")
    LOOPS[kind](w, carry, (body, out), (most, limit))
    w.allowed = allowed
    w.variables = [*before, *(v for v in w.variables if v not in before)]
    ended(w, carry, out)


def scan(w: Writer, carry: Carry, names: tuple[str, str], steps: tuple[int, str]) -> None:
    (body, out), (_, limit) = names, steps
    w.tags.update(["lax's scan of no steps"] if limit == "0" else [])
    with within(w, int(limit)), w.function(f"{body}(c, _)"):
        w.line(f"return {step(w, carry, 'c')}, None")
    w.line(f"{out}, _ = lax.scan({body}, {carry.init}, None, {limit})")


def fori(w: Writer, carry: Carry, names: tuple[str, str], steps: tuple[int, str]) -> None:
    (body, out), (_, limit) = names, steps
    w.tags.update(["lax's scan of no steps"] if limit == "0" else [])
    i = w.name("i")
    with within(w, int(limit)), w.function(f"{body}({i}, c)"):
        w.add(i, INT)
        w.line(f"return {step(w, carry, 'c')}")
    w.line(f"{out} = lax.fori_loop(0, {limit}, {body}, {carry.init})")


def while_(w: Writer, carry: Carry, names: tuple[str, str], steps: tuple[int, str]) -> None:
    """It has no derivative in reverse mode, but where it is replaced."""
    (body, out), (most, limit) = names, steps
    w.tags.update(["lax's while", "while", "no bound"])
    stop = limit if limit.isdigit() else w.let(limit, INT, prefix="n").name
    i = w.name("i")
    with within(w, most), w.function(f"{body}(both)"):
        w.add(i, INT)
        w.line(f"{i}, c = both")
        w.line(f"return {i} + 1, {step(w, carry, 'c')}")
    goes_on = f"lambda both: both[0] < {stop}"
    w.line(f"{out} = lax.while_loop({goes_on}, {body}, (0, {carry.init}))[1]")


LOOPS = {"scan": scan, "fori": fori, "while": while_}
