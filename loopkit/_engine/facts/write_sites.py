"""Where a step writes to its buffers, found in its jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from loopkit import _jax
from loopkit._buffers.slices import read_p, write_p
from loopkit._buffers.window import Window
from loopkit._engine.facts.counters import PASSING, moved_by
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations


@dataclass(frozen=True)
class Write:
    """An equation that writes to a buffer."""

    leaf: int
    window: Window
    fresh: bool
    """Whether no other write of the loop is to the same rows."""


@dataclass(frozen=True)
class Inner:
    """An equation that holds others: a call or a loop."""

    sites: dict[int, Any]
    loop: Loop | None


WIDE = 4
"""Bytes of integers that count over all rows of a buffer without starting over."""

Sites = dict[int, Any]
"""What writes to the buffers in a jaxpr: by the place of the equation, a Write or an Inner."""


def find_writes(loop: Loop, leaf: int) -> Sites | None:
    """What writes to a buffer; None if something else than reads and writes makes the next one."""
    j, found = _jax.open_jaxpr(loop.body), {}
    start = j.invars[loop.const_count + leaf]
    if _trace_back(j, j.outvars[leaf], leaf, found) is not start:
        return None
    return _freshened(found, j, loop, leaf)


def writes_once(loop: Loop, leaf: int) -> bool:
    """Whether each step writes to rows of a buffer that no other step writes to, in one place."""
    sites = find_writes(loop, leaf) if loop.length is not None else None
    return bool(sites) and all(isinstance(s, Write) and s.fresh for s in sites.values())


def writes_rows(loop: Loop, leaf: int) -> bool:
    """Whether a step does nothing to a buffer but write one row of it, which no other writes."""
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
    """`linear` with its writes to buffers marked as fresh; `leaves` are pairs (input, output)."""
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

    def marked(eqn: Any) -> Any:
        if id(eqn) not in fresh:
            return eqn
        params = dict(eqn.params, fresh=True, alone=fresh[id(eqn)])
        return _jax.new_equation(eqn, write_p, eqn.invars, eqn.outvars, params)

    return equations.map_equations(linear, marked) if fresh else linear


def _trace_back(j: Any, var: Any, leaf: int, sites: Sites) -> Any:
    """The input of `j` that becomes the output `var` by reads and writes; None if none does.

    Fills in the sites of the writes.
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
        elif eqn.primitive is while_p and eqn.params["loop"].cond is None:
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


def holds_write(jaxpr: Any) -> bool:
    """Whether a jaxpr writes to a buffer, loops in it included."""
    return any(
        eqn.primitive is write_p
        or (eqn.primitive is while_p and any(eqn.params["loop"].is_buffer))
        or (equations.is_call(eqn) and holds_write(eqn.params["jaxpr"]))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
    )


def merged(a: Sites, b: Sites) -> Sites:
    out = dict(a)
    for at, site in b.items():
        if at in out:
            assert isinstance(site, Inner), "an equation writes to one buffer"
            out[at] = Inner(merged(out[at].sites, site.sites), site.loop)
        else:
            out[at] = site
    return out


def _freshened(sites: Sites, j: Any, loop: Loop, leaf: int) -> Sites:
    """The sites of a buffer, where one that writes to another row each step is marked."""
    if len(sites) != 1:
        return sites
    ((at, site),) = sites.items()
    if not isinstance(site, Write) or site.window.mode != "drop":
        return sites
    eqn, shape = j.eqns[at], loop.carry_types[leaf].shape
    columns = _columns(j, eqn.invars[2], loop)
    for axis, counts in zip(site.window.axes, columns, strict=True):
        # Consecutive rows, no more of them than there are: also where they wrap around.
        if counts and site.window.sizes[axis] == 1 and (loop.length or 0) <= shape[axis]:
            return {at: Write(leaf, site.window, fresh=True)}
    return sites


def _columns(j: Any, starts: Any, loop: Loop) -> list[bool]:
    """For each column of the starts of a single slice, whether it is a counter of steps."""
    maker = equations.maker_of(j)
    carry = j.invars[loop.const_count : loop.const_count + loop.carry_count]
    place = {v: i for i, v in enumerate(carry)}

    def source(v: Any) -> Any:
        """Where a value comes from, up to a constant that is added to it."""
        while (eqn := maker(v)) is not None:
            name, ins = eqn.primitive.name, eqn.invars
            known = [isinstance(u, _jax.Literal) for u in ins]
            if name in ("add", "sub") and any(known) and not (name == "sub" and known[0]):
                v = ins[1] if known[0] else ins[0]
            elif name in PASSING and len(ins) == 1 and v.aval.dtype.itemsize >= WIDE:
                v = ins[0]
            else:
                return v
        return v

    def counts(v: Any) -> bool:
        v = source(v)
        if isinstance(v, _jax.Literal) or v not in place or v.aval.shape != ():
            return False
        dtype = v.aval.dtype
        if not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize < WIDE:
            return False
        return moved_by(j.outvars[place[v]], v, maker) in (1, -1)

    width, columns, eqn = starts.aval.shape[-1], [starts], maker(starts)
    if width > 1 and eqn is not None and eqn.primitive.name in ("concatenate", "stack"):
        columns = eqn.invars
    single = starts.aval.size == width == len(columns)
    return list(map(counts, columns)) if single else [False] * width
