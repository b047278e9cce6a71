"""Compute gradients of matrices with one product per segment instead of one per step.

The cotangent of a weight matrix is a sum over the steps of products of two factors, in most loops
x_t and the cotangent of x_t W. Adding each product to the sum at once reads and writes the whole
matrix in every step. If the factors are smaller than the matrix, the loop stores them instead, and
multiplies them at the end of a segment, with the step axis as one more axis to contract:

sum_t dot(a_t, b_t) = dot(a, b), contracted over t as well

A factor that the segment already stores as a row is not stored again.
"""

from __future__ import annotations

import functools as ft
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loopkit import _jax
from loopkit._buffers.slices import write_p
from loopkit._engine.loop import kept
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import SMALLEST
from loopkit._jaxprs.products import product

_UNARY = """
    broadcast_in_dim convert_element_type copy copy_p neg reshape squeeze transpose
"""
UNARY = frozenset(_UNARY.split())
"""Linear primitives that may be applied to a product."""

Term = tuple[Any, ...]
"""The equation of a product, then those applied to its result, in order."""


@dataclass(frozen=True)
class Products:
    """The backward half of a step, with its products deferred."""

    step: _jax.Jaxpr
    """The backward half with the factors as its last outputs, and without the deferred outputs."""
    put_off: tuple[bool, ...]
    """Which outputs of the backward half `sums` computes."""
    terms: tuple[tuple[Term, ...], ...]
    """The terms of each deferred output."""
    factors: tuple[Any, ...]
    """The factors to store for each step."""
    rows: dict
    """For each factor that the segment already stores, the index of its rows."""

    @property
    def factor_types(self) -> list[_jax.ShapedArray]:
        return [v.aval for v in self.factors]

    def sums(self, factors: Sequence[Any], rows: Sequence[Any]) -> list:
        """Return the deferred outputs, summed over the steps whose factors and rows are stacked."""
        place = dict(zip(self.factors, factors, strict=True))
        place.update({v: rows[i] for v, i in self.rows.items()})
        return [
            ft.reduce(operator.add, [_evaluate(t, place) for t in terms]) for terms in self.terms
        ]


def put_off(
    backward: _jax.Jaxpr, consts: int, fixed: int, first_row: int, rows: Sequence[int | None]
) -> Products:
    """Find the products worth deferring among the first `consts` outputs of a backward half.

    Its first `fixed` inputs are the same for all steps. For each input from `first_row` on, `rows`
    has the index of the segment's row that it is, or None. The next inputs are the sums so far.
    """
    j = _jax.open_jaxpr(backward)
    maker = equations.maker_of(j)
    given = dict(zip(j.invars[first_row:], rows, strict=False))
    in_rows = {v: row for v, row in given.items() if row is not None}
    still = set(j.invars[:fixed])
    sums = set(j.invars[first_row + len(rows) :][:consts])
    chosen: list[bool] = []
    terms: list[tuple[Term, ...]] = []
    factors: dict = {}
    for out in j.outvars[:consts]:
        found = _terms(out, maker, still, sums) or []
        worth = bool(found) and _pays(out, found, {*in_rows, *factors})
        chosen.append(worth)
        if worth:
            terms.append(tuple(found))
            factors |= dict.fromkeys(v for v in _factors(found) if v not in in_rows)
    flags = (*chosen, *[False] * (len(j.outvars) - consts))
    used = {v for group in terms for v in _factors(group)}
    step = _jax.with_outputs(
        backward, [*kept(j.outvars, [not f for f in flags]), *factors], [True] * len(j.invars)
    )
    in_rows = {v: i for v, i in in_rows.items() if v in used}
    return Products(step, flags, tuple(terms), tuple(factors), in_rows)


def _terms(v: _jax.Atom, maker: Callable[[Any], Any], still: set, sums: set) -> list[Term] | None:
    """Return the products that `v` adds to a sum so far, or None if it is not such a sum."""
    after: list = []
    while True:
        if not isinstance(v, _jax.Literal) and v in sums:
            return []
        eqn = maker(v)
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "dot_general":
            varies = [not isinstance(u, _jax.Literal) and u not in still for u in eqn.invars]
            return [(eqn, *after[::-1])] if all(varies) else None
        if name == "add_any":
            parts = [_terms(u, maker, still, sums) for u in eqn.invars]
            if any(p is None for p in parts):
                return None
            return [(*term, *after[::-1]) for p in parts if p for term in p]
        if _adds_to_a_part(eqn):
            whole, part = (_terms(u, maker, still, sums) for u in eqn.invars[:2])
            if whole is None or part is None:
                return None
            return [(*term, *after[::-1]) for term in (*whole, *((*p, eqn) for p in part))]
        if name not in UNARY or len(eqn.invars) != 1:
            return None
        after.append(eqn)
        v = eqn.invars[0]


def _adds_to_a_part(eqn: _jax.Equation) -> bool:
    """Return whether an equation adds to a part of an array that is the same in every step."""
    unmasked = eqn.primitive is write_p and len(eqn.invars) == 3
    return unmasked and eqn.params["add"] and not eqn.params["window"].axes


def _factors(terms: Sequence[Term]) -> list:
    return [v for made, *_ in terms for v in made.invars]


def _pays(out: _jax.Atom, terms: Sequence[Term], present: set) -> bool:
    """Return whether storing new factors takes fewer bytes than reading and writing the sum."""
    new = set(_factors(terms)) - present
    size = _jax.byte_count(out.aval)
    return size > SMALLEST and sum(_jax.byte_count(v.aval) for v in new) < 2 * size


def _evaluate(term: Term, place: dict) -> Any:
    made, *after = term
    (left, right), (left_batch, right_batch) = made.params["dimension_numbers"]
    shift = lambda axes: tuple(a + 1 for a in axes)
    contracted = (0, *shift(left)), (0, *shift(right))
    numbers = contracted, (shift(left_batch), shift(right_batch))
    made = made.replace(params={**made.params, "dimension_numbers": numbers})
    value = product(made, *(place[v] for v in made.invars))
    for eqn in after:
        ins = [value]
        if _adds_to_a_part(eqn):
            whole, _, starts = (_jax.zeros(v.aval) for v in eqn.invars)
            ins = [whole, value, starts]
        (value,) = _jax.bind_equation(eqn, ins)
    return value
