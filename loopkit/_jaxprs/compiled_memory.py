"""Find which values XLA keeps in memory if it compiles a function together with its linear part.

XLA fuses a cheap function of one array into each kernel that reads its result. So it does not keep
1 - y**2 if it keeps y: the kernels that read it compute it. An elementwise value with one reader is
fused into that kernel, whatever it costs. All other values are kept until the linear part has read
them. A sum of cotangents is a kernel, too: its terms are kept until all of them are there.

The rules are those of XLA's `InstructionFusion` and `CpuInstructionFusion`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loopkit import _jax
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import Accelerator
from loopkit._jaxprs.cost import CHEAP
from loopkit._jaxprs.min_cut import Residuals

_DEAR = """
    acos acosh asin asinh atan atan2 atanh cbrt cosh div erf erf_inv erfc exp exp2 expm1 log log1p
    logistic pow rem rsqrt sinh sqrt tanh
"""
DEAR = frozenset(_DEAR.split())
"""Elementwise primitives that XLA computes once for all their readers."""
COMPLEX = frozenset(("abs", "cos", "sign", "sin", "tan"))
"""Primitives that are expensive for complex numbers alone."""
DUPLICATED = (CHEAP | COMPLEX) - DEAR
"""Primitives that XLA computes for each reader, if they read one array."""
ELEMENTWISE = DUPLICATED | DEAR
"""Primitives that XLA can fuse into the kernel that reads their result."""
_VIEWS = """
    copy copy_p expand_dims name pvary reshape squeeze stop_gradient transpose
"""
VIEWS = frozenset(_VIEWS.split())
"""Primitives whose results have the elements of an operand, so that a product reads that."""
POOLS = frozenset(("reduce_window_max", "reduce_window_min"))
"""Primitives whose gradient goes to the chosen element of each window."""
IN_PLACE = frozenset(("dynamic_update_slice", "loopkit_write", "scatter", "scatter-add"))
"""Primitives that write into the memory of an operand that nothing else reads."""


def takes_over(eqn: _jax.Equation) -> bool:
    """Return whether results can take over the memory of operands that nothing else reads."""
    name = eqn.primitive.name
    return name in CHEAP or name in IN_PLACE or bool(handed_on(eqn))


def handed_on(eqn: _jax.Equation) -> list[tuple[_jax.Var, _jax.Var]]:
    """Return the results that are operands in the same memory, each with its operand."""
    pairs: Iterable[tuple] = ()
    if eqn.primitive.name == "optimization_barrier":
        pairs = zip(eqn.outvars, eqn.invars, strict=True)
    elif eqn.primitive.name == "loopkit_read":
        pairs = [(eqn.outvars[-1], eqn.invars[0])]
    elif equations.is_remat(eqn):
        inside = _jax.open_jaxpr(equations.jaxprs_in(eqn)[0])
        same = dict(zip(inside.invars, eqn.invars, strict=True))
        for each in inside.eqns:
            same |= {v: same[u] for v, u in handed_on(each) if u in same}
        outs = zip(eqn.outvars, inside.outvars, strict=True)
        pairs = [(v, same[u]) for v, u in outs if not isinstance(u, _jax.Literal) and u in same]
    return [(v, u) for v, u in pairs if not isinstance(u, _jax.Literal)]


def kept_by_compiler(residuals: Residuals, linear: _jax.Jaxpr) -> list:
    """Return the variables of a function that a compiler keeps for its linear part.

    The inputs of the linear part are the residuals of the function, and then tangents.
    """
    return _Kept(residuals, _jax.open_jaxpr(linear)).found()


def term_bytes(eqns: Sequence[_jax.Equation]) -> Mapping[_jax.Var, int]:
    """Return the bytes of the terms of each variable's cotangent, if a kernel adds them all up.

    The kernel itself computes the terms from elementwise equations and slices, and so reads the
    terms of their results. Products, loops and the like make an array for each variable they read.
    """
    found: Counter[_jax.Var] = Counter()
    for eqn in reversed(eqns):
        for v in set(equations.variables(eqn)):
            found[v] += added_bytes(v, eqn, found)
    return found


def added_bytes(v: _jax.Var, eqn: _jax.Equation, terms: Mapping[_jax.Var, int]) -> int:
    """Return the bytes that an equation adds to the terms of the cotangent of a variable."""
    name, whole = eqn.primitive.name, _jax.byte_count(v.aval)
    if name != "reduce_sum" and name not in ELEMENTWISE:
        return whole
    read = terms if name in ELEMENTWISE else {}
    made = sum(read.get(u, _jax.byte_count(u.aval)) for u in eqn.outvars)
    return made if name in VIEWS else min(whole, made)


def index_bytes(eqns: Iterable[_jax.Equation], device: Accelerator | None) -> int:
    """Return the bytes of the indices with which XLA for CPUs reverses max-pooling.

    XLA makes them first of all: an integer for each axis of each element.
    """
    pooled = [eqn.invars[0].aval for eqn in eqns if eqn.primitive.name in POOLS]
    shapes = [t.shape for t in pooled if _jax.is_differentiable(t)]
    return 0 if device else sum(4 * len(shape) * _jax.volume(shape) for shape in shapes)


class _Kept:
    """A function and its linear part, and how many readers each value has."""

    def __init__(self, residuals: Residuals, linear: _jax.OpenJaxpr) -> None:
        step, results = residuals.step, residuals.results
        self._maker, self._given = equations.maker_of(step), residuals.given
        self._residuals = list(map(self._viewed, step.outvars[results:]))
        self._readers = Counter(v for e in step.eqns for v in set(equations.variables(e)))
        self._readers.update(_jax.variables(step.outvars[:results]))
        self._read_whole = self._going_back(linear)

    def _going_back(self, linear: _jax.OpenJaxpr) -> set:
        """Count the readers of residuals; return the residuals that no kernel computes itself."""
        pairs = zip(linear.invars, self._residuals, strict=False)
        name, whole = {inside: v for inside, v in pairs if not isinstance(v, _jax.Literal)}, set()
        for eqn in linear.eqns:
            for v in {name[v] for v in equations.variables(eqn) if v in name}:
                if eqn.primitive.name in VIEWS:
                    name |= dict.fromkeys(eqn.outvars, v)
                else:
                    self._readers[v] += 1
                    if eqn.primitive.name not in ELEMENTWISE:
                        whole.add(v)
        return whole

    def found(self) -> list:
        """Return the variables that are kept."""
        kept: dict[_jax.Var, None] = {}
        pending = [(v, True) for v in reversed(_jax.variables(self._residuals))]
        met = set()
        while pending:
            v, once = reading = pending.pop()
            if reading in met:
                continue
            met.add(reading)
            once = once and self._readers[v] <= 1
            eqn = None if v in self._given or v in self._read_whole else self._maker(v)
            if eqn is not None and self._is_fused(eqn, v, once):
                pending += [(u, once) for u in reversed(equations.variables(eqn))]
            elif v not in self._given:
                kept[v] = None
        return list(kept)

    def _is_fused(self, eqn: _jax.Equation, v: _jax.Var, once: bool) -> bool:
        """Return whether kernels that read a value compute it; `once` says if there is only one."""
        if eqn.effects or eqn.primitive.name not in ELEMENTWISE:
            return False
        return once or self._is_duplicated(eqn, v)

    def _viewed(self, v: _jax.Var) -> Any:
        """Return the array that a value is a view of."""
        return equations.source(v, self._maker, _is_view)

    def _is_duplicated(self, eqn: _jax.Equation, v: _jax.Var) -> bool:
        """Return whether each reader of a value computes it.

        A reader does if the value depends on one array, beside broadcasts and arrays of fewer
        axes, or on no more elements than it has.
        """
        if eqn.primitive.name not in DUPLICATED or _is_dear(eqn):
            return False
        some = equations.variables(eqn)
        arrays = [u for u in some if _axes(u) >= _axes(v) and not self._is_broadcast(u)]
        return len(arrays) <= 1 or sum(map(_volume, set(some))) <= _volume(v)

    def _is_broadcast(self, v: _jax.Var) -> bool:
        eqn = self._maker(v)
        return eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "iota")


def _is_dear(eqn: _jax.Equation) -> bool:
    """Return whether XLA considers an equation expensive because of its types."""
    if not eqn.invars:
        return False
    first = eqn.invars[0].aval
    if eqn.primitive.name == "convert_element_type":
        return first.dtype == "float32" and eqn.outvars[0].aval.dtype == "bfloat16"
    return eqn.primitive.name in COMPLEX and first.dtype.kind == "c"


def _is_view(eqn: _jax.Equation) -> bool:
    """Return whether a result has the elements of the first operand."""
    some = equations.variables(eqn)
    if eqn.primitive.name == "broadcast_in_dim":
        return bool(some) and _volume(some[0]) == _volume(eqn.outvars[0])
    return eqn.primitive.name in VIEWS and bool(some)


def _axes(v: _jax.Var) -> int:
    """Return the number of axes longer than one."""
    return sum(_jax.volume([n]) != 1 for n in v.aval.shape)


def _volume(v: _jax.Var) -> int:
    return _jax.volume(v.aval.shape)
