"""Windows: the elements of a buffer that a read or a write touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from typing import TypeAlias as Alias

import jax
import jax.numpy as jnp
import numpy as np

Starts: Alias = jax.Array | np.ndarray[Any, Any]
"""The starts of slices, each along the last axis; a NumPy array if they are known."""


@dataclass(frozen=True)
class Window:
    """The elements that a read or a write touches, once the starts are known.

    `starts`, integers `[*batch, len(axes)]`, says where each of a batch of slices begins along
    `axes`. The slices are stacked in an array `[*batch, *sizes]`, and keep axes of size one. A mask
    has the shape of the slices, or size one along axes where it does not vary."""

    axes: tuple[int, ...]
    """The axes along which starts are given."""
    offsets: tuple[int, ...]
    """Where every slice starts along the other axes; an entry for each axis of the buffer."""
    sizes: tuple[int, ...]
    """The shape of a slice."""
    mode: str
    """How to treat slices out of bounds: "clip" moves them inside, "drop" reads zeros and writes
    nothing. "promise_in_bounds" promises that there are none; as in lax, reads are then moved
    inside, and writes dropped."""
    wrap: bool = True
    """Whether negative starts count from the end."""

    def with_axis(self, axis: int, size: int) -> Window:
        """Return the window for a buffer with one more axis, which each slice takes whole."""
        return replace(
            self,
            axes=tuple(a + (a >= axis) for a in self.axes),
            offsets=(*self.offsets[:axis], 0, *self.offsets[axis:]),
            sizes=(*self.sizes[:axis], size, *self.sizes[axis:]),
        )

    def with_index(self, axis: int) -> Window:
        """Return the window for a buffer with one more axis, indexed by the last of the starts."""
        wider = self.with_axis(axis, 1)
        return replace(wider, axes=(*wider.axes, axis))

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a slice fits in a buffer of this shape."""
        pairs = zip(self.sizes, shape, strict=True)
        # A symbolic size may be anything.
        return all(s <= n for s, n in pairs if isinstance(s, int) and isinstance(n, int))

    def along(self, sizes: Sequence[Any], dtype: np.dtype[Any]) -> Any:
        """Return the sizes along `axes` as an array, which is traced if a size is symbolic."""
        found = [sizes[a] for a in self.axes]
        if all(isinstance(n, int) for n in found):
            return np.array(found, dtype)
        return jnp.stack([jnp.asarray(n, dtype) for n in found])

    def starts_in(
        self, shape: Sequence[int], starts: Starts, reads: bool = False
    ) -> tuple[Any, Any]:
        """Return starts along `axes`, counted from 0, and which slices are inside (None: all)."""
        if not self.axes:
            return starts, None
        room = self.along(shape, starts.dtype)
        last = room - self.along(self.sizes, starts.dtype)
        if self.wrap:
            starts = jnp.where(starts < 0, starts + room, starts)
        if self.mode == "clip" or (reads and self.mode != "drop"):
            return jnp.clip(starts, 0, last), None
        return starts, ((starts >= 0) & (starts <= last)).all(-1)

    def inside(self, shape: Sequence[int], starts: Starts) -> Any:
        """Return whether each slice is inside."""
        if not self.axes:
            return jnp.ones(starts.shape[:-1], bool)
        return replace(self, mode="drop").starts_in(shape, starts)[1]

    def point(self, starts: Starts) -> list:
        """Return the start of a single slice along every axis."""
        point: list = list(self.offsets)
        for column, axis in enumerate(self.axes):
            point[axis] = starts[column]
        return [jnp.asarray(p, starts.dtype) for p in point]

    def every_start(self, starts: Starts) -> tuple[Any, tuple[int, ...]]:
        """Return the starts along `axes` and along axes with an offset, and all these axes."""
        extra = [a for a, offset in enumerate(self.offsets) if offset]
        fixed = np.array([self.offsets[a] for a in extra], starts.dtype)
        fixed = np.broadcast_to(fixed, (*starts.shape[:-1], len(extra)))
        return jnp.concatenate([starts, fixed], -1), (*self.axes, *extra)


def outside(buffer: jax.Array, *operands: jax.Array, window: Window, **params: Any) -> tuple:
    """Return which starts are out of bounds in slices read or written, the starts, and the axes."""
    starts, *masks = operands if "value" in params else operands[1:]
    bad = ~window.inside(buffer.shape, starts)
    if masks:
        bad = bad & masks[0].any(tuple(range(bad.ndim, masks[0].ndim)))
    return jnp.broadcast_to(bad[..., None], starts.shape), starts, window.axes
