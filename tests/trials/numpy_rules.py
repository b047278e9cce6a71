"""JAX's operations in NumPy, by their names. Operands have one dtype, as in JAX."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RULES: dict[str, Callable] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "rem": np.fmod,
    "is_finite": np.isfinite,
    "real": np.real,
    "imag": np.imag,
    "conj": lambda x, **_: np.conj(x),
    "copy": np.array,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "square": np.square,
    "copy_p": np.array,
    "stop_gradient": np.array,
    "stage": np.array,
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "unstack": lambda x, *, axis: list(np.moveaxis(x, axis, 0)),
    "shift_left": np.left_shift,
    "tile": lambda x, *, reps, **_: np.tile(x, reps),
}


def rule(function: Callable) -> Callable:
    RULES[function.__name__.strip("_")] = function
    return function


@rule
def div(x, y):
    exact = np.issubdtype(x.dtype, np.inexact)
    return x / y if exact else np.trunc(x / np.where(y == 0, 1, y)).astype(x.dtype)


@rule
def rsqrt(x, **_):
    return 1 / np.sqrt(x)


@rule
def logistic(x, **_):
    return 1 / (1 + np.exp(-x))


@rule
def integer_pow(x, *, y):
    return 1 / x**-y if y < 0 else x**y


@rule
def _complex(x, y):
    return x + 1j * y


@rule
def clamp(low, x, high):
    return np.minimum(np.maximum(x, low), high)


@rule
def select_n(which, *cases):
    return np.choose(np.asarray(which, "int32"), cases)


@rule
def convert_element_type(x, *, new_dtype, **_):
    if new_dtype == np.bool_:
        return x != 0
    real = np.iscomplexobj(x) and not np.issubdtype(new_dtype, np.complexfloating)
    return np.asarray(np.real(x) if real else x).astype(new_dtype)


@rule
def broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    place = [1] * len(shape)
    for at, size in zip(broadcast_dimensions, np.shape(x), strict=True):
        place[at] = size
    return np.broadcast_to(np.reshape(x, place), shape)


@rule
def reshape(x, *, new_sizes, **_):
    return np.reshape(x, new_sizes)


@rule
def transpose(x, *, permutation):
    return np.transpose(x, permutation)


@rule
def squeeze(x, *, dimensions):
    return np.squeeze(x, tuple(dimensions))


@rule
def expand_dims(x, *, dimensions):
    return np.expand_dims(x, tuple(dimensions))


@rule
def concatenate(*xs, dimension):
    return np.concatenate(xs, dimension)


@rule
def stack(*xs, axis):
    return np.stack(xs, axis)


@rule
def split(x, *, sizes, axis):
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@rule
def one_minus_square(x, **_):
    return 1 - x * x


@rule
def _slice(x, *, start_indices, limit_indices, strides):
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


@rule
def rev(x, *, dimensions):
    return np.flip(x, dimensions)


@rule
def iota(*, dtype, shape, dimension, **_):
    sizes = [n if at == dimension else 1 for at, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


@rule
def pad(x, value, *, padding_config):
    padded = [
        low + n + high + max(0, n - 1) * gap
        for n, (low, high, gap) in zip(x.shape, padding_config, strict=True)
    ]
    full = [
        max(0, low) + max(0, n - 1) * (gap + 1) + min(n, 1)
        for n, (low, _, gap) in zip(x.shape, padding_config, strict=True)
    ]
    room = np.full(
        [
            max(f, p + max(0, -low))
            for f, p, (low, _, _) in zip(full, padded, padding_config, strict=True)
        ],
        value,
        x.dtype,
    )
    room[
        tuple(
            slice(max(0, low), max(0, low) + max(0, n - 1) * (gap + 1) + min(n, 1), gap + 1)
            for n, (low, _, gap) in zip(x.shape, padding_config, strict=True)
        )
    ] = x
    return room[
        tuple(
            slice(max(0, -low), max(0, -low) + p)
            for p, (low, _, _) in zip(padded, padding_config, strict=True)
        )
    ]


@rule
def dynamic_slice(x, *starts, slice_sizes):
    return x[placed(x, starts, slice_sizes)]


@rule
def dynamic_update_slice(x, update, *starts):
    new = np.array(x)
    new[placed(x, starts, update.shape)] = update
    return new


def placed(x, starts, sizes):
    limits = zip(starts, x.shape, sizes, strict=True)
    inside = [int(np.clip(int(s), 0, n - size)) for s, n, size in limits]
    return tuple(slice(s, s + size) for s, size in zip(inside, sizes, strict=True))


def reduction(name: str, function: Callable) -> None:
    RULES[name] = lambda x, *, axes, **_: function(x, axis=tuple(axes))


for _name, _function in {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "and": np.all,
    "or": np.any,
}.items():
    reduction(f"reduce_{_name}", _function)


@rule
def argmax(x, *, axes, index_dtype):
    return np.argmax(x, axes[0]).astype(index_dtype)


@rule
def argmin(x, *, axes, index_dtype):
    return np.argmin(x, axes[0]).astype(index_dtype)


@rule
def cumsum(x, *, axis, reverse):
    flipped = np.flip(x, axis) if reverse else x
    sums = np.cumsum(flipped, axis, dtype=x.dtype)
    return np.flip(sums, axis) if reverse else sums


@rule
def dot_general(x, y, *, dimension_numbers, **_):
    (cx, cy), (bx, by) = dimension_numbers
    names = iter(range(50))
    left = [next(names) for _ in x.shape]
    right = [next(names) for _ in y.shape]
    for a, b in [*zip(cx, cy, strict=True), *zip(bx, by, strict=True)]:
        right[b] = left[a]
    free = lambda named, used: [n for at, n in enumerate(named) if at not in used]
    out = [left[a] for a in bx] + free(left, (*cx, *bx)) + free(right, (*cy, *by))
    return np.einsum(x, left, y, right, out)


@rule
def sort(*xs, dimension, num_keys, **_):
    order = (
        np.lexsort(xs[:num_keys][::-1], axis=dimension)
        if num_keys > 1
        else np.argsort(xs[0], dimension, kind="stable")
    )
    return [np.take_along_axis(x, order, dimension) for x in xs]
