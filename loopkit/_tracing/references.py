"""References to memory (`jax.new_ref`) in the functions of a loop.

A reference that a step makes for itself is removed, which leaves a function of values. A reference
made outside is a leaf of the carry. It is read before the loop, and written after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loopkit import _jax
from loopkit._engine.loop import parts


class Functions(NamedTuple):
    """The two functions of a loop, as functions of values."""

    cond: Any
    cond_consts: list
    body: Any
    consts: list
    references: Sequence[Any] = ()
    """The references made outside: the last leaves of the carry."""


def without_references(functions: Functions, carry_count: int) -> Functions:
    """Return functions of values, which take what references among their constants hold."""
    cond, cond_consts, body, consts, _ = functions
    of = {id(v): v for v in (*cond_consts, *consts) if _jax.is_reference(v)}
    if cond is not None:
        cond, cond_consts = _of_values(cond, cond_consts, of, carry_count, None)
    body, consts = _of_values(body, consts, of, carry_count, carry_count)
    return Functions(cond, cond_consts, body, consts, [*of.values()])


def _of_values(
    jaxpr: _jax.Jaxpr, consts: list, references: dict, carry_count: int, behind: int | None
) -> tuple[Any, list]:
    """Return the function of (constants, carry, references, x), and its constants.

    It returns what the references hold in the end after its first `behind` results; with None, it
    does not return that.
    """
    kept, of_values = [v for v in consts if id(v) not in references], _jax.of_values(jaxpr)

    def function(*values: jax.Array) -> list:
        given, carry, held, x = parts(values, len(kept), carry_count, len(references))
        now, left = dict(zip(references, held, strict=True)), iter(given)
        every = [now[id(v)] if id(v) in now else next(left) for v in consts]
        outs, ends = parts(_jax.call_jaxpr(of_values)(*every, *carry, *x), len(jaxpr.out_avals))
        now |= zip([id(v) for v in consts if id(v) in now], ends, strict=True)
        return outs if behind is None else [*outs[:behind], *now.values(), *outs[behind:]]

    _, carry_types, x_types = parts(jaxpr.in_avals, len(consts), carry_count)
    held = map(_jax.type_in, references.values())
    types = [*map(jax.typeof, kept), *carry_types, *held, *x_types]
    return _jax.trace_closed(function, types, "loop_of_values"), kept


def read(references: Sequence[Any]) -> list:
    return [r[...] for r in references]


def write(references: Sequence[Any], values: Sequence[Any]) -> None:
    for reference, value in zip(references, values, strict=True):
        # Under vmap, jax 0.10 expects a value written to `...` to have its lanes where the
        # reference has.
        reference[slice(None) if value.ndim else ...] = value
