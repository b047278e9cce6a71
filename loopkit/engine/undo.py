"""Buffers are not copied into checkpoints: going back, what steps wrote is taken out again.

Going forward, each write leaves in a log where it wrote and what it displaced, which is as large as
what is written, not as the buffer. Going back, the log is played backwards, so that the buffer is as
it was before any step that is replayed. Nothing displaced is logged where a row is provably
written once: there the initial buffer has it.

This is for buffers that a step reads from and writes to, in loops of known bounds; inner loops
may write to them if they take a fixed number of steps. Others are saved as any carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loopkit import _jax
from loopkit._jax import Jaxpr, ShapedArray
from loopkit._slices import read, read_p, write, write_p
from loopkit._window import Window
from loopkit.engine.loop import Loop, kept, parts
from loopkit.engine.primitives import while_p
from loopkit.engine.steps import read_rows, repeat_backwards, row_of


@dataclass(frozen=True)
class _Write:
    """An equation that writes to a buffer."""

    leaf: int
    window: Window
    fresh: bool
    """Whether no other write of the loop is to the same rows."""


@dataclass(frozen=True)
class _Inner:
    """An equation that holds others: a call or a loop."""

    sites: dict[int, Any]
    loop: Loop | None


Sites = dict[int, Any]
"""What writes to the buffers in a jaxpr: by the place of the equation, a _Write or an _Inner."""


@dataclass(frozen=True)
class Undo:
    """How the buffers of a loop are brought back."""

    leaves: tuple[bool, ...]
    """Which carry leaves: buffers that are not saved."""
    log_types: list[ShapedArray]
    """What one step logs."""
    forward: Jaxpr
    """(consts, carry, x) -> carry, y, log"""
    back: Jaxpr
    """(initial buffers, buffers after a step, its log) -> buffers before it"""
    batched: tuple[bool, ...] = ()
    """In the batched loop made from another: which parts of the log have the new axis."""

    @property
    def step_bytes(self) -> int:
        return sum(t.size * t.dtype.itemsize for t in self.log_types)

    def logged(self, loop: Loop) -> Loop:
        """The loop with its log after the ys. It must be bounded."""
        return loop.derived(
            ("logged", self.leaves),
            lambda: loop.replace(body=self.forward, log_count=len(self.log_types)),
        )

    def step_back(
        self, loop: Loop, step: Any, initial: list, buffers: list, log: Sequence[Any]
    ) -> list:
        """The buffers before a step, from those after it, or from those before it."""
        row = read_rows(log, row_of(loop, step))
        return list(_jax.call_jaxpr(self.back)(*initial, *buffers, *row))

    def steps_back(
        self, loop: Loop, first: Any, count: Any, initial: list, buffers: list, log: Sequence[Any]
    ) -> list:
        """The buffers before step `first`, from those `count` steps later."""

        def back(k: Any, buffers: list) -> list:
            return self.step_back(loop, first + k, initial, buffers, log)

        return repeat_backwards(count, back, buffers, 1)


def find_undo(loop: Loop, saved: Sequence[bool]) -> Undo | None:
    """How to do without saving buffers among the `saved` carry leaves; None if none can be."""
    if loop.length is None or not loop.buffers:
        return None
    j = _jax.open_jaxpr(loop.body)
    sites: Sites = {}
    leaves = []
    for leaf, (is_buffer, keep) in enumerate(zip(loop.buffers, saved, strict=True)):
        found: Sites = {}
        start = j.invars[loop.const_count + leaf]
        undone = is_buffer and keep and _trace_back(j, j.outvars[leaf], leaf, found) is start
        leaves.append(undone)
        if undone:
            sites = _merged(sites, _freshened(found, j, loop, leaf))
    if not any(leaves):
        return None
    flags, count = tuple(leaves), len(loop.body.out_avals)

    def forward(*values: Any) -> list:
        outs, log = _logging(j, values, sites)
        return [*outs, *log]

    logging, closed_over = _jax.trace(forward, list(loop.body.in_avals), "loop_step_logged")
    assert not closed_over, "a body's jaxpr closes over nothing"
    log_types = list(logging.out_avals[count:])
    numbers = [i for i, f in enumerate(flags) if f]
    types = kept(loop.carry_types, flags)

    def back(*values: Any) -> list:
        initial, buffers, log = parts(values, len(numbers), len(numbers))
        state = dict(zip(numbers, buffers, strict=True))
        state = _undone(sites, state, dict(zip(numbers, initial, strict=True)), log)
        return [state[i] for i in numbers]

    undoing, closed_over = _jax.trace(back, [*types, *types, *log_types], "loop_step_undone")
    assert not closed_over, "a log closes over nothing"
    return Undo(flags, log_types, logging, undoing)


# ---------------------------------------------------------------- where buffers are written


def _is_call(eqn: Any) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and hasattr(eqn.params.get("jaxpr"), "eqns")


def _trace_back(j: Any, var: Any, leaf: int, sites: Sites) -> Any:
    """The input of `j` that becomes the output `var` by reads and writes; None if none does.

    Fills in the sites of the writes.
    """
    makers = {v: (at, eqn) for at, eqn in enumerate(j.eqns) for v in eqn.outvars}
    inputs = set(j.invars)
    while True:
        if isinstance(var, _jax.Literal):
            return None
        if var in inputs:
            return var
        if var not in makers:
            return None
        at, eqn = makers[var]
        inner: Sites = {}
        if eqn.primitive is read_p and var is eqn.outvars[-1]:
            var = eqn.invars[0]
        elif eqn.primitive is write_p:
            sites[at] = _Write(leaf, eqn.params["window"], fresh=False)
            var = eqn.invars[0]
        elif _is_call(eqn):
            called = _jax.open_jaxpr(eqn.params["jaxpr"])
            out = called.outvars[eqn.outvars.index(var)]
            start = _trace_back(called, out, leaf, inner)
            if start is None:
                return None
            sites[at] = _Inner(inner, None)
            var = eqn.invars[called.invars.index(start)]
        elif eqn.primitive is while_p and eqn.params["loop"].cond is None:
            loop, place = eqn.params["loop"], eqn.outvars.index(var)
            if place >= loop.carry_count:
                return None
            body = _jax.open_jaxpr(loop.body)
            start = body.invars[loop.const_count + place]
            if _trace_back(body, body.outvars[place], leaf, inner) is not start:
                return None
            sites[at] = _Inner(inner, loop)
            var = eqn.invars[loop.cond_const_count + loop.const_count + place]
        else:
            return None


def _merged(a: Sites, b: Sites) -> Sites:
    out = dict(a)
    for at, site in b.items():
        if at in out:
            assert isinstance(site, _Inner), "an equation writes to one buffer"
            out[at] = _Inner(_merged(out[at].sites, site.sites), site.loop)
        else:
            out[at] = site
    return out


# ---------------------------------------------------------------- rows that are written once


def _freshened(sites: Sites, j: Any, loop: Loop, leaf: int) -> Sites:
    """The sites of a buffer, where one that writes to another row each step is marked."""
    if len(sites) != 1:
        return sites
    ((at, site),) = sites.items()
    if not isinstance(site, _Write) or not site.window.drop:
        return sites
    eqn, shape = j.eqns[at], loop.carry_types[leaf].shape
    columns = _columns(j, eqn.invars[2], loop)
    for axis, counts in zip(site.window.axes, columns, strict=True):
        # Consecutive rows, no more of them than there are: also where they wrap around.
        if counts and site.window.sizes[axis] == 1 and (loop.length or 0) <= shape[axis]:
            return {at: _Write(leaf, site.window, fresh=True)}
    return sites


def _columns(j: Any, starts: Any, loop: Loop) -> list[bool]:
    """For each column of the starts of a single slice, whether it is a counter of steps."""
    makers = {v: eqn for eqn in j.eqns for v in eqn.outvars}
    carry = j.invars[loop.const_count : loop.const_count + loop.carry_count]
    place = {v: i for i, v in enumerate(carry)}

    def source(v: Any, through: tuple[str, ...]) -> Any:
        """Where a value comes from, up to a constant that is added to it."""
        while not isinstance(v, _jax.Literal) and v in makers:
            eqn = makers[v]
            name, ins = eqn.primitive.name, eqn.invars
            known = [isinstance(u, _jax.Literal) for u in ins]
            if name in ("add", "sub") and any(known) and not (name == "sub" and known[0]):
                v = ins[1] if known[0] else ins[0]
            elif name in through and len(ins) == 1:
                v = ins[0]
            else:
                return v
        return v

    def counts(v: Any) -> bool:
        v = source(v, ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"))
        if isinstance(v, _jax.Literal) or v not in place or v.aval.shape != ():
            return False
        return _advances_by_one(j.outvars[place[v]], v, makers)

    width = starts.aval.shape[-1]
    if starts.aval.size != width or isinstance(starts, _jax.Literal):
        return [False] * width
    if width == 1:
        return [counts(starts)]
    eqn = makers.get(starts)
    if eqn is not None and eqn.primitive.name in ("concatenate", "stack"):
        if len(eqn.invars) == width:
            return [counts(v) for v in eqn.invars]
    return [False] * width


def _advances_by_one(after: Any, before: Any, makers: dict) -> bool:
    eqn = None if isinstance(after, _jax.Literal) else makers.get(after)
    while eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = makers.get(eqn.invars[0])
    if eqn is None or eqn.primitive.name not in ("add", "sub"):
        return False
    a, b = eqn.invars
    if eqn.primitive.name == "add" and isinstance(a, _jax.Literal):
        a, b = b, a
    return a is before and isinstance(b, _jax.Literal) and abs(int(b.val)) == 1


# ---------------------------------------------------------------- logging and undoing


def _logging(j: Any, values: Sequence[Any], sites: Sites) -> tuple[list, list]:
    """The results of a jaxpr, and the log of what it writes."""
    env, log = dict(zip(j.invars, values, strict=True)), []

    def value(v: Any) -> Any:
        return v.val if isinstance(v, _jax.Literal) else env[v]

    for at, eqn in enumerate(j.eqns):
        ins, site = [value(v) for v in eqn.invars], sites.get(at)
        if isinstance(site, _Write):
            log.append(ins[2])
            if not site.fresh:
                old, ins[0] = read(ins[0], ins[2], site.window)
                log.append(old)
            outs = _jax.bind_equation(eqn, ins)
        elif site is not None and site.loop is None:
            outs, more = _logging(_jax.open_jaxpr(eqn.params["jaxpr"]), ins, site.sites)
            log += more
        elif site is not None:
            outs = while_p.bind(*ins, loop=_logging_loop(site))
            outs, more = parts(outs, len(eqn.outvars))
            log += more
        else:
            outs = _jax.bind_equation(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value(v) for v in j.outvars], log


def _logging_loop(site: _Inner) -> Loop:
    loop = site.loop
    assert loop is not None, "a call is not a loop"
    j = _jax.open_jaxpr(loop.body)

    def step(*values: Any) -> list:
        outs, log = _logging(j, values, site.sites)
        return [*outs, *log]

    body, _ = _jax.trace(step, list(loop.body.in_avals), "loop_step_logged")
    return loop.replace(body=body)


def _log_size(site: Any) -> int:
    if isinstance(site, _Write):
        return 1 if site.fresh else 2
    return sum(map(_log_size, site.sites.values()))


def _undone(sites: Sites, state: dict, initial: dict, log: Sequence[Any]) -> dict:
    """The buffers before the equations at the sites, last first."""
    order = sorted(sites)
    *logs, _ = parts(log, *[_log_size(sites[at]) for at in order])
    for at, rows in reversed(list(zip(order, logs, strict=True))):
        site = sites[at]
        if isinstance(site, _Inner):
            state = _undone_inside(site, state, initial, rows)
            continue
        starts = rows[0]
        old = read(initial[site.leaf], starts, site.window)[0] if site.fresh else rows[1]
        state = {**state, site.leaf: write(state[site.leaf], old, starts, site.window)}
    return state


def _undone_inside(site: _Inner, state: dict, initial: dict, log: Sequence[Any]) -> dict:
    loop = site.loop
    if loop is None:
        return _undone(site.sites, state, initial, log)
    if not loop.length:
        return state
    inner = loop

    def back(step: Any, state: dict) -> dict:
        return _undone(site.sites, state, initial, read_rows(log, row_of(inner, step)))

    return repeat_backwards(loop.length, back, state, 1)


# ---------------------------------------------------------------- vmap


def batch_undo(undo: Undo, axis: Any, consts: list, carry: list, slices: list) -> Undo:
    """vmap of an undo, log for log; the axes are those of the batched loop."""
    results = len(undo.forward.out_avals) - len(undo.log_types)
    count = len(carry)
    outs = [*carry, *["free"] * (len(undo.forward.out_avals) - count)]
    forward, flags = _jax.batch_jaxpr(undo.forward, axis, [*consts, *carry, *slices], outs)
    log = flags[results:]
    places = kept(carry, undo.leaves)
    ins = [*places, *places, *[0 if f else None for f in log]]
    back, _ = _jax.batch_jaxpr(undo.back, axis, ins, places)
    return Undo(undo.leaves, list(forward.out_avals[results:]), forward, back, tuple(log))
