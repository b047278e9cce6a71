"""The prices of equations on a CPU: nanoseconds of one core.

The prices were measured in a loop over the primitive alone. They are right within a factor of about
two, from 1 to 1,000,000 numbers of 32 bits. `python benchmarks/costs.py` measures them again.
Only ratios matter for a decision, such as whether to run a step again or to store its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from loopkit import _jax

EQUATION = 0.3
"""The fewest nanoseconds that an equation takes, as part of a kernel with others."""
ELEMENT = 0.04
"""The nanoseconds for an element of plain arithmetic; one vector instruction computes many."""
FLOPS = 200.0
"""The floating-point operations per nanosecond in a product of matrices."""

_PLAIN = """
    abs add add_any and ceil clamp clz complex conj convert_element_type copy copy_p eq eq_to floor
    from_edtype ge gt imag integer_pow is_finite le le_to lt lt_to max min mul mulhi ne neg not
    one_minus_square or pad population_count real reduce_precision rev round select_n shift_left
    shift_right_arithmetic shift_right_logical sign square stack stage sub tile to_edtype xor
"""
PLAIN = frozenset(_PLAIN.split())
"""Primitives that cost `ELEMENT` for each element."""
_FREE = """
    after_all axis_index bitcast_convert_type broadcast_in_dim create_token dce_sink device_put
    empty empty2 expand_dims iota name optimization_barrier platform_index pvary random_seed
    random_unwrap random_wrap reshape sharding_constraint split squeeze stop_gradient tie unstack
"""
FREE = frozenset(_FREE.split())
"""Primitives without a cost per element: the kernel that reads the result computes them."""
_COLLECTIVE = """
    all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmin ppermute
    preduced precv psend psum psum_invariant ragged_all_to_all reduce_scatter unreduced_pmax
    unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast
"""
"""Collectives, in which devices wait for each other."""
_CALLS = "ffi_call io_callback pure_callback"
OUTSIDE = frozenset(_COLLECTIVE.split() + _CALLS.split())
"""Primitives whose time is not the device's alone."""


class Price(NamedTuple):
    """A price in nanoseconds: `start` for any number of elements, and `element` for each."""

    start: float
    element: float


_PRICES = {
    _PLAIN: (EQUATION, ELEMENT),
    _FREE: (EQUATION, 0),
    _COLLECTIVE: (5_000, 0.2),
    _CALLS: (1_000, 1),
    "div nextafter sqrt": (4, 0.25),
    "rsqrt erf tanh": (25, 0.35),
    "exp exp2 log log2 logistic": (35, 0.6),
    "expm1 log1p cosh erfc": (40, 1.1),
    "acosh asinh atanh bessel_i0e bessel_i1e": (30, 2),
    "cos sin tan": (15, 4),
    "sinh erf_inv": (15, 2.4),
    "cbrt pow rem": (15, 6),
    "acos asin atan atan2 digamma": (30, 12),
    "polynomial": (2, 0.5),
    "lgamma": (60, 14),
    "igamma igammac polygamma regularized_incomplete_beta zeta": (250, 80),
    "igamma_grad_a random_gamma_grad": (300, 110),
    "reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor": (
        2,
        0.25,
    ),
    "argmax argmin": (5, 4),
    "cumlogsumexp": (50, 450),
    "concatenate": (1, 0.2),
    "transpose": (1, 0.7),
    "top_k approx_top_k": (90, 1.7),
    "random_bits random_fold_in threefry2x32": (70, 7),
    "random_split": (70, 3.5),
    "rng_bit_generator rng_uniform": (25, 12),
    "random_gamma": (500, 800),
    "lu_pivots_to_permutation": (5, 20),
    "select_and_gather_add": (5, 0.5),
    "select_and_scatter select_and_scatter_add": (50, 3.5),
}
PRICES = {name: Price(*of) for names, of in _PRICES.items() for name in names.split()}
"""Prices of primitives whose time depends on the elements of their largest operand or result."""
WHOLE = {"div": Price(3, 0.7), "rem": Price(3, 0.7)}
"""Prices for integers, of primitives whose time differs for them."""
UNKNOWN_PRICE = Price(1, 0.5)
"""The price of a primitive of another library: many only mark something, and some compute a lot."""

_LIBRARY = {
    "cholesky": (250, 3.5, 0.005),
    "cholesky_update": (20, 2.3, 0),
    "eig": (1_900, 230, 0.2),
    "eigh": (250, 70, 0.01),
    "geqp3": (500, 14, 0.06),
    "geqrf householder_product ormqr": (250, 9, 0.015),
    "hessenberg": (250, 16, 0.065),
    "lu": (250, 5.5, 0.008),
    "qr": (600, 16, 0.026),
    "schur": (600, 170, 0.2),
    "svd": (1_400, 95, 0.12),
    "tridiagonal": (250, 13, 0.024),
}
LIBRARY = {name: of for names, of in _LIBRARY.items() for name in names.split()}
"""Prices of factorisations: per call, per element, and per element times the smaller side."""
SCATTERS = [f"scatter{s}" for s in ("", "-add", "-sub", "-mul", "-min", "-max")]
CACHED_ARRAY = 1 << 18
"""The words of a matrix that fit in a core's cache."""
INLINE, MULTIPLE = 27, 8
"""The most multiplications for which a kernel multiplies two small matrices itself, and the number
that the sides of larger matrices should be multiples of."""


def nanoseconds(eqn: _jax.Equation) -> float:
    """Predict the time of an equation that holds no others, on a CPU."""
    name = eqn.primitive.name
    if name in MEASURES:
        return MEASURES[name](eqn)
    price = PRICES.get(name, UNKNOWN_PRICE)
    if name in WHOLE and not _jax.is_differentiable(eqn.outvars[0].aval):
        price = WHOLE[name]
    return price.start + price.element * _largest(eqn)


def _words(v: _jax.Atom) -> float:
    """Return the elements of a variable; an element of more than 32 bits counts as several."""
    itemsize = getattr(getattr(v.aval, "dtype", None), "itemsize", 4)
    return _jax.elements(v.aval) * max(1.0, itemsize / 4)


def _largest(eqn: _jax.Equation) -> float:
    return max(map(_words, (*eqn.outvars, *eqn.invars)), default=1)


def _known(size: Any) -> int:
    """Return the length of an axis, or a number that stands for it if it is not known."""
    return _jax.volume([size])


# --- primitives with measures of their own -------------------------------------------------------


def _cumulative(eqn: _jax.Equation) -> float:
    length = max(2, _known(eqn.invars[0].aval.shape[eqn.params["axis"]]))
    return 5 + 0.35 * _largest(eqn) * math.log2(length)


def _sort(eqn: _jax.Equation) -> float:
    length = max(1, _known(eqn.invars[0].aval.shape[eqn.params["dimension"]]))
    return EQUATION + 14 * _jax.elements(eqn.invars[0].aval) * math.log2(length)


def _fft(eqn: _jax.Equation) -> float:
    types = eqn.invars[0].aval, eqn.outvars[0].aval
    numbers = max(map(_jax.elements, types)) * max(t.dtype.itemsize for t in types) / 8
    return 750 + 0.55 * numbers * math.log2(max(2, _jax.volume(eqn.params["fft_lengths"])))


def _window(eqn: _jax.Equation) -> float:
    volume = _jax.volume(eqn.params["window_dimensions"])
    return EQUATION + 0.1 * volume * _words(eqn.outvars[0])


TOUCHED = {
    **dict.fromkeys(SCATTERS, 2),
    **dict.fromkeys(("dynamic_update_slice", "loopkit_write", "swap", "addupdate"), 1),
    **dict.fromkeys(("gather", "slice", "dynamic_slice", "loopkit_read", "get"), -1),
}
"""The operand that is copied by a primitive which touches a part of an array; -1 is the result."""


def touched(eqn: _jax.Equation) -> _jax.Atom:
    """Return the variable that is copied by an equation which touches a part of an array."""
    return eqn.invars[at] if (at := TOUCHED[eqn.primitive.name]) >= 0 else eqn.outvars[0]


def _slices(each: float) -> Callable[[Any], float]:
    """Return a measure of a gather or a scatter."""

    def measure(eqn: _jax.Equation) -> float:
        count = _jax.volume(eqn.invars[1].aval.shape[:-1])
        return 5 + each * count + 0.1 * _words(touched(eqn))

    return measure


def _part(eqn: _jax.Equation) -> float:
    return EQUATION + ELEMENT * _words(touched(eqn))


def _library(eqn: _jax.Equation) -> float:
    call, square, cube = LIBRARY[eqn.primitive.name]
    *batch, m, n = map(_known, eqn.invars[0].aval.shape)
    words = _words(eqn.invars[0]) / max(1, math.prod(batch) * m * n)
    one = square * m * n + cube * m * n * min(m, n)
    if eqn.params.get("compute_uv") is False:
        one /= 2
    return call + math.prod(batch) * (words * one + 0.6 * call * (math.prod(batch) > 1))


def _dot(eqn: _jax.Equation) -> float:
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0]
    depth = _jax.volume(left.shape[a] for a in contracted)
    batch = _jax.volume(left.shape[a] for a in batched)
    sides = [max(1, _jax.elements(v) // max(1, batch * depth)) for v in (left, right)]
    m, n, k = *sides, depth
    if min(sides) == 1 and m * n * k > INLINE:  # a product with a vector reads the matrix once
        words = max(map(_words, eqn.invars))
        each = 0.1 if max(sides) == 1 else 0.03
        return 5 + min(0.25 * words, 40 + each * words) + 0.25 * max(0, words - CACHED_ARRAY)
    words = _words(out) / max(1, batch * m * n)
    return batch * words * _product(m, n, k) + 5


def _product(m: int, n: int, k: int) -> float:
    """Predict the time of a product of two matrices of 32 bits."""
    if m * n * k <= INLINE:
        return 0.4 * m * n * k
    begin = 600 if any(side % MULTIPLE for side in (m, n, k)) else 200
    return begin + 0.1 * (m * n + m * k + n * k) + 2 * m * n * k / FLOPS


def _symmetric_product(eqn: _jax.Equation) -> float:
    *batch, m, k = map(_known, eqn.invars[0].aval.shape)
    return math.prod(batch) * _product(m, m, k)


def _ragged_dot(eqn: _jax.Equation) -> float:
    columns = _known(eqn.outvars[0].aval.shape[-1])
    return 600 + 2 * _words(eqn.invars[0]) * columns / FLOPS


def _convolution(eqn: _jax.Equation) -> float:
    """Predict the time of a convolution: a direct loop, or a matrix product (features last)."""
    dimensions, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval
    depth = _jax.elements(kernel) / max(1, _known(kernel.shape[dimensions.rhs_spec[0]]))
    last = dimensions.lhs_spec[1] == len(kernel.shape) - 1 and depth >= MULTIPLE
    return 10 + (0.05 if last else 0.5) * _words(eqn.outvars[0]) * depth


def _triangular(eqn: _jax.Equation) -> float:
    *batch, m, _ = map(_known, eqn.invars[0].aval.shape)
    columns = _words(eqn.invars[1]) / max(1, math.prod(batch) * m)
    return 250 + math.prod(batch) * (m * m + 5 * m * columns + 0.02 * m * m * columns)


def _tridiagonal_solve(eqn: _jax.Equation) -> float:
    return 250 + 19 * _words(eqn.invars[-1])


MEASURES: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(LIBRARY, _library),
    "dot_general": _dot,
    "symmetric_product": _symmetric_product,
    **dict.fromkeys(("ragged_dot_general", "scaled_dot"), _ragged_dot),
    "conv_general_dilated": _convolution,
    "triangular_solve": _triangular,
    "tridiagonal_solve": _tridiagonal_solve,
    "fft": _fft,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _cumulative),
    "sort": _sort,
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(TOUCHED, _part),
    "gather": _slices(1.0),
    **dict.fromkeys(SCATTERS, _slices(1.5)),
}
"""Primitives whose time does not depend on the number of elements alone."""
KNOWN = {*MEASURES, *PRICES}
"""Primitives with a price, whatever jaxprs they hold."""
