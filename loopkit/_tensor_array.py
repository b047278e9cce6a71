"""A list of arrays of one shape, as an array that is written row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class TensorArray:
    """Rows."""

    def __init__(self, data, count):
        self.data, self.count = data, count

    def tree_flatten(self) -> tuple[tuple, Any]:
        return (self.data, self.count), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Sequence[Any]) -> TensorArray:
        return cls(*children)
