"""Find where a step writes to its buffers, in its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._buffers.slices import read_p, write_p
from loopkit._buffers.window import Window
from loopkit._engine.facts.bounds import KEEPS_VALUE, find_counters, moved_by
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.integers import FAR, WIDE


@dataclass(frozen=True)
class Write:
    """An equation that writes to a buffer."""

    leaf: int
    window: Window
    fresh: bool
    """Whether no other write in the loop is to the same rows."""
    starts: _jax.Jaxpr | None = None
    """A function from counters to the starts of its slices, if counters determine these."""
    index_counters: tuple[int, ...] = ()
    """The carry leaves of the counters that `starts` takes."""


@dataclass(frozen=True)
class Span:
    """Rows that an equation writes one after another, and nothing else in the loop writes."""

    leaf: int
    window: Window
    before: int
    """The operand of the equation that says where the span begins."""
    after: int
    """The result that says where the span ends."""
    offset: int
    """The number to add to the counter to get the index of a row."""
    starts: _jax.Jaxpr
    """A function from the counter to the starts of the slice that is written."""


@dataclass(frozen=True)
class Inner:
    """An equation that holds others: a call or a loop."""

    sites: dict[int, Any]
    loop: Loop | None
    spans: tuple[Span, ...] = ()
    """Spans of other buffers than those of the sites."""


Sites = dict[int, Any]
"""A Write or an Inner for each equation that writes to buffers, by its index in the jaxpr."""


def find_writes(loop: Loop, leaf: int) -> Sites | None:
    """Return the sites that write to a buffer; None if the step changes it in any other way."""
    j, found = _jax.open_jaxpr(loop.body), {}
    start = j.invars[loop.const_count + leaf]
    if _trace_back(j, j.outvars[leaf], leaf, found) is not start:
        return None
    return _freshened(found, j, loop, leaf)


def writes_once(loop: Loop, leaf: int) -> bool:
    """Return whether a step writes to a buffer at one site, in rows that no other step writes."""
    sites = find_writes(loop, leaf)
    return bool(sites) and all(isinstance(s, Write) and s.fresh for s in sites.values())


def writes_rows(loop: Loop, leaf: int) -> bool:
    """Return whether a step only writes one row to a buffer, which no other step writes."""
    sites = find_writes(loop, leaf) if writes_once(loop, leaf) else None
    if sites is None:
        return False
    j = _jax.open_jaxpr(loop.body)
    ((at, site),) = sites.items()
    before, after = j.eqns[at].invars[0], j.eqns[at].outvars[0]
    uses = sum(v is before or v is after for eqn in j.eqns for v in eqn.invars)
    straight = before is j.invars[loop.const_count + leaf] and after is j.outvars[leaf]
    return straight and uses == 1 and site.window.axes == (0,)


def with_fresh_writes(linear: _jax.Jaxpr, leaves: Sequence[tuple[int, int]]) -> _jax.Jaxpr:
    """Return `linear` with writes to buffers marked fresh; `leaves` are pairs (input, output)."""
    j, fresh = _jax.open_jaxpr(linear), {}
    for before, after in leaves:
        sites: Sites = {}
        start, end = j.invars[before], j.outvars[after]
        if _trace_back(j, end, after, sites) is start:
            uses = sum(v is start for eqn in j.eqns for v in eqn.invars)
            for at in (at for at, site in sites.items() if isinstance(site, Write)):
                eqn = j.eqns[at]
                alone = uses == 1 and eqn.invars[0] is start and eqn.outvars[0] is end
                fresh[id(eqn)] = alone

    def marked(eqn: _jax.Equation) -> Any:
        if id(eqn) not in fresh:
            return eqn
        params = dict(eqn.params, fresh=True, alone=fresh[id(eqn)])
        return _jax.new_equation(eqn, write_p, eqn.invars, eqn.outvars, params)

    return equations.map_equations(linear, marked) if fresh else linear


def _trace_back(j: _jax.OpenJaxpr, var: _jax.Var, leaf: int, sites: Sites) -> Any:
    """Return the input of `j` that becomes the output `var` through reads and writes, or None.

    Add the sites of the writes to `sites`.
    """
    maker, places = equations.maker_of(j), {id(eqn): at for at, eqn in enumerate(j.eqns)}
    while (eqn := maker(var)) is not None:
        at, inner = places[id(eqn)], {}
        if eqn.primitive is read_p and var is eqn.outvars[-1]:
            var = eqn.invars[0]
        elif eqn.primitive is write_p:
            sites[at] = Write(leaf, eqn.params["window"], fresh=False)
            var = eqn.invars[0]
        elif equations.is_call(eqn):
            called = _jax.open_jaxpr(eqn.params["jaxpr"])
            out = called.outvars[eqn.outvars.index(var)]
            start = _trace_back(called, out, leaf, inner)
            if start is None:
                return None
            sites[at] = Inner(inner, None)
            var = eqn.invars[called.invars.index(start)]
        elif eqn.primitive is while_p:
            loop, place = eqn.params["loop"], eqn.outvars.index(var)
            if place >= loop.carry_count:
                return None
            body = _jax.open_jaxpr(loop.body)
            start = body.invars[loop.const_count + place]
            if _trace_back(body, body.outvars[place], leaf, inner) is not start:
                return None
            sites[at] = Inner(inner, loop)
            var = eqn.invars[loop.cond_const_count + loop.const_count + place]
        else:
            return None
    return var if var in j.invars else None


def holds_write(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr, or a loop in it, writes to a buffer."""
    return any(eqn.primitive is write_p for eqn in equations.all_equations(jaxpr))


def merged(a: Sites, b: Sites) -> Sites:
    out = dict(a)
    for at, site in b.items():
        if at in out:
            assert isinstance(site, Inner), "an equation writes to one buffer"
            sites = merged(out[at].sites, site.sites)
            out[at] = Inner(sites, site.loop, out[at].spans + site.spans)
        else:
            out[at] = site
    return out


def _freshened(sites: Sites, j: _jax.OpenJaxpr, loop: Loop, leaf: int) -> Sites | None:
    """Return the sites of a buffer, with a site marked if it writes to another row in each step.

    Return None if not even a log could hold what the writes displace.
    """
    if len(sites) == 1:
        ((at, site),) = sites.items()
        if isinstance(site, Write) and _is_fresh(site, j, j.eqns[at], loop):
            return {at: _told(replace(site, fresh=True), j.eqns[at], loop)}
        if isinstance(site, Inner) and (span := _span(j, at, site, leaf, loop)) is not None:
            return {at: Inner({}, site.loop, (span,))}
    return None if _ends_by_itself(sites) else sites


def _ends_by_itself(sites: Sites) -> bool:
    """Return whether a write is in a loop whose number of steps is not known."""
    inside = [s for s in sites.values() if isinstance(s, Inner)]
    return any(
        (s.loop is not None and s.loop.cond is not None) or _ends_by_itself(s.sites) for s in inside
    )


def _is_fresh(site: Write, j: _jax.OpenJaxpr, eqn: _jax.Equation, loop: Loop) -> bool:
    """Return whether a write goes through consecutive rows, and writes none twice."""
    for axis, column in _counted_rows(site, j, eqn, loop):
        rows = eqn.invars[0].aval.shape[axis]
        if loop.length is not None and not _jax.is_symbolic(rows) and loop.length <= rows:
            return True  # even if they wrap around
        least = loop.carry[column.leaf].counter_lower_bound
        if column.by == 1 and _stays_above(site.window, least, column.offset):
            return True
    return False


def _told(site: Write, eqn: _jax.Equation, loop: Loop) -> Write:
    """Return the site with its starts, if counters determine these."""
    starts, used = _made_from(eqn.invars[2], loop)
    counters, leaves = find_counters(loop), [i - loop.const_count for i in used]
    if any(not 0 <= i < loop.carry_count or counters[i] is None for i in leaves):
        return site
    return replace(site, starts=starts, index_counters=tuple(leaves))


def _made_from(starts: _jax.Atom, loop: Loop) -> tuple[_jax.Jaxpr, list[int]]:
    """Return the function from inputs of the body to the starts of slices, and these inputs."""
    count = len(loop.body.in_avals)
    made = _jax.with_outputs(loop.body, [starts], [True] * count)
    made, used = _jax.dce(made, [True], [False] * count)
    return made, [i for i, u in enumerate(used) if u]


def _stays_above(window: Window, least: int | None, offset: int) -> bool:
    """Return whether an increasing counter never indexes from the end of the buffer."""
    return not window.wrap or (least is not None and 0 <= least + offset < FAR)


def _span(j: _jax.OpenJaxpr, at: int, site: Inner, leaf: int, loop: Loop) -> Span | None:
    """Return the span that a call or a loop writes, if it writes each row once."""
    eqn, carry = j.eqns[at], j.invars[loop.const_count : loop.const_count + loop.carry_count]
    found = _span_of(eqn, site, leaf)
    if found is None or eqn.invars[found.before] not in carry:
        return None
    counter = carry.index(eqn.invars[found.before])
    if j.outvars[counter] is not eqn.outvars[found.after]:
        return None
    least = loop.carry[counter].counter_lower_bound
    return found if _stays_above(found.window, least, found.offset) else None


def _span_of(eqn: _jax.Equation, site: Inner, leaf: int) -> Span | None:
    """Return the span that a call or a loop writes, while its counter goes from row to row."""
    if len(site.sites) != 1:
        return None
    ((at, inner),) = site.sites.items()
    loop = site.loop
    j = _jax.open_jaxpr(eqn.params["jaxpr"] if loop is None else loop.body)
    if isinstance(inner, Write):
        return None if loop is None else _span_of_steps(j, at, inner, leaf, loop)
    found = _span_of(j.eqns[at], inner, leaf)
    if found is None:
        return None
    before, after = j.eqns[at].invars[found.before], j.eqns[at].outvars[found.after]
    if before not in j.invars or after not in j.outvars:
        return None
    place, result = j.invars.index(before), j.outvars.index(after)
    if loop is None:
        return replace(found, before=place, after=result)
    if place - loop.const_count != result or result >= loop.carry_count:
        return None
    return replace(found, before=loop.cond_const_count + place, after=result)


def _span_of_steps(j: _jax.OpenJaxpr, at: int, site: Write, leaf: int, loop: Loop) -> Span | None:
    """Return the rows that the steps of a loop write, one in each step."""
    for _, column in _counted_rows(site, j, j.eqns[at], loop):
        if column.by == 1:
            place = loop.const_count + column.leaf
            starts, used = _made_from(j.eqns[at].invars[2], loop)
            if used == [place]:
                before = loop.cond_const_count + place
                return Span(leaf, site.window, before, column.leaf, column.offset, starts)
    return None


class Column(NamedTuple):
    """A counter that is a column of the starts of slices."""

    leaf: int
    """The carry leaf of the counter."""
    offset: int
    """The number that is added to it."""
    by: int
    """1 if the counter goes up, -1 if it goes down."""


def _counted_rows(
    site: Write, j: _jax.OpenJaxpr, eqn: _jax.Equation, loop: Loop
) -> list[tuple[int, Column]]:
    """Return the axes along which each step writes the row that a counter names."""
    if site.window.mode != "drop":
        return []
    pairs = zip(site.window.axes, counted_columns(j, eqn.invars[2], loop), strict=True)
    return [(a, c) for a, c in pairs if c is not None and site.window.sizes[a] == 1]


def counted_columns(j: _jax.OpenJaxpr, starts: _jax.Atom, loop: Loop) -> list[Column | None]:
    """Return, for each column of the starts of a single slice, the counter that it is, or None."""
    maker = equations.maker_of(j)
    carry = j.invars[loop.const_count : loop.const_count + loop.carry_count]
    place = {v: i for i, v in enumerate(carry)}

    def counter(v: _jax.Atom) -> Column | None:
        v, offset = _source(v, maker)
        if isinstance(v, _jax.Literal) or v not in place or v.aval.shape != ():
            return None
        dtype = v.aval.dtype
        if not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize < WIDE:
            return None
        by = moved_by(j.outvars[place[v]], v, maker)
        return Column(place[v], offset, by) if by in (1, -1) else None

    width, columns, eqn = starts.aval.shape[-1], [starts], maker(starts)
    if width > 1 and eqn is not None and eqn.primitive.name in ("concatenate", "stack"):
        columns = eqn.invars
    single = starts.aval.size == width == len(columns)
    return list(map(counter, columns)) if single else [None] * width


def _source(v: _jax.Atom, maker: Callable[[Any], Any]) -> tuple[Any, int]:
    """Return the source of a value, and the constant that is added to it."""
    offset = 0
    while (eqn := maker(v)) is not None:
        name, ins = eqn.primitive.name, eqn.invars
        known = [isinstance(u, _jax.Literal) for u in ins]
        if name in ("add", "sub") and any(known) and not (name == "sub" and known[0]):
            v, by = (ins[1], ins[0]) if known[0] else ins
            if np.ndim(by.val):
                return None, 0
            offset += int(by.val) if name == "add" else -int(by.val)
        elif name in KEEPS_VALUE and len(ins) == 1 and v.aval.dtype.itemsize >= WIDE:
            v = ins[0]
        else:
            break
    return v, offset
