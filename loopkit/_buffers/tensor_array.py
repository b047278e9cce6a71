"""A growing list of arrays of one type: a buffer, and the number of its entries in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path
from jaxtyping import Array, ArrayLike, Int32, PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.error_on_use import ErrorIf, error_on_use
from loopkit._arguments.errors import short_type
from loopkit._arguments.static_leaves import alike, bare, named, shape_of, wrapped
from loopkit._buffers.buffer import Buffer
from loopkit._buffers.keywords import ArrayType, E, Integer, Tree

NAME = "TensorArray"


@jax.tree_util.register_pytree_with_keys_class
class TensorArray(Generic[E]):
    """A list of arrays, or trees of them, all of one shape and dtype.

    !!! Example

        ```python
        import jax.numpy as jnp
        import loopkit

        outputs = loopkit.TensorArray.empty(100, jnp.zeros(3))
        outputs = outputs.append(jnp.ones(3))  # as outputs.write(len(outputs), jnp.ones(3))
        print(outputs.stack())  # [[1. 1. 1.]]
        ```

    Methods return an updated array; the old one stays as it was. A `TensorArray` is a pytree. In
    the carry of a loop it is a buffer without being named: each step costs what it writes and
    reads, forward and backward.

    Outside `jax.jit` it grows as you append to it, and n appends cost O(n). In a loop or under
    `jax.jit` the number of elements is not known, and the capacity is fixed: to append past it is
    an error at run time, which a loop raises when it ends."""

    __slots__ = ("_data", "_size", "_stored", "_tail", "_tree")
    _is_whole = True

    _data: list[Any]
    """An array [capacity, ...], or a Buffer, for each leaf of an element."""
    _tree: Any
    _size: Any
    _stored: Any
    """The number of elements in `_data`; later ones are in the tail."""
    _tail: list[list[Any]]
    """Elements not stored yet. It may hold more, appended to another TensorArray."""

    def __init__(self, *_: Any, **__: Any):
        problem = "an array must be made with `empty` or `from_array`"
        advice = f"Write `{NAME}.empty(capacity, element)`, or `{NAME}.from_array(rows)`."
        raise TypeError(errors.message(NAME, problem, "a call of the class", advice))

    @staticmethod
    def _of(data: Sequence[Any], tree: _jax.TreeDef, size: Any) -> TensorArray[Any]:
        new = object.__new__(TensorArray)
        new._data, new._tree, new._tail = list(data), tree, []
        new._size = new._stored = size
        return new

    # ---------------------------------------------------------------- made from

    @overload
    @staticmethod
    def empty(capacity: int, element: ArrayLike | ArrayType) -> TensorArray[Array]: ...
    @overload
    @staticmethod
    def empty(capacity: int, element: Tree) -> TensorArray[Any]: ...
    @overload
    @staticmethod
    def empty(capacity: int, element: E) -> TensorArray[E]: ...
    @staticmethod
    def empty(capacity: int, element: Any) -> TensorArray[Any]:
        """Make an array without elements, with room for `capacity` of them.

        **Arguments:**

        - `capacity`: the number of elements that it has room for, an int.
        - `element`: an array or a tree of arrays, or of `jax.ShapeDtypeStruct`s, like the elements.
          Leaves that are neither are the same in all elements.
        """
        expected = "an int >= 0 (elements)"
        capacity = validate.check_whole(f"{NAME}.empty", "capacity", capacity, 0, expected)
        is_type = lambda v: isinstance(v, jax.ShapeDtypeStruct)
        zero = lambda v: jnp.zeros(v.shape, v.dtype) if is_type(v) else v
        element = wrapped(f"{NAME}.empty", "element", jax.tree.map(zero, element))
        types, tree = jax.tree.flatten(element)
        if not types:
            advice, got = "Count with an int instead.", repr(bare(element))
            raise _wrong(ValueError, "empty", "element", "must have an array in it", got, advice)
        return TensorArray._of([jnp.zeros((capacity, *t.shape), t.dtype) for t in types], tree, 0)

    @overload
    @staticmethod
    def from_array(array: ArrayLike) -> TensorArray[Array]: ...
    @overload
    @staticmethod
    def from_array(array: E) -> TensorArray[E]: ...
    @staticmethod
    def from_array(array: Any) -> TensorArray[Any]:
        """Make an array of the rows of an array, or of a tree of arrays: the inverse of `stack`."""
        leaves, tree = jax.tree.flatten(wrapped(f"{NAME}.from_array", "array", array))
        rows = {v.shape[0] if v.ndim else None for v in leaves}
        if len(rows) != 1 or None in rows:
            shapes = ", ".join(short_type(jax.typeof(v)) for v in leaves) or "no arrays"
            expected = "must have leaves with leading axes of one length"
            advice = "Stack the elements along their leading axis."
            raise _wrong(ValueError, "from_array", "array", expected, shapes, advice)
        return TensorArray._of(leaves, tree, rows.pop())

    # ---------------------------------------------------------------- as a pytree

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], Any]:
        children, tree = self.tree_flatten()
        names = [*[f"elements[{i}]" for i in range(len(children) - 1)], "size"]
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, children, strict=True)), tree

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        data, size = self._settled(), self._size
        # A tree of other things, such as the axes of jax.vmap, keeps what it has for the size.
        counts = isinstance(size, int) and hasattr(self._data[0], "shape")
        return (*data, jnp.int32(size) if counts else size), self._tree

    @classmethod
    def tree_unflatten(cls, tree: Any, children: Sequence[Any]) -> TensorArray[E]:
        *data, size = children
        return cls._of(data, tree, size)

    # ---------------------------------------------------------------- size

    @property
    def size(self) -> int | Int32[Array, ""]:
        """The number of elements: an int, or an int32 array if it is traced."""
        return int(self._size) if self._is_known() else self._size

    @property
    def capacity(self) -> int:
        """The number of elements that it has room for."""
        return self._settled()[0].shape[0]

    def __len__(self) -> int:
        if not self._is_known():
            problem = "`len` needs a known number of elements"
            raise TypeError(errors.message(NAME, problem, "a traced number", "Use `.size`."))
        return int(self._size)

    def __repr__(self) -> str:
        if not hasattr(self._data[0], "shape"):
            return f"TensorArray({self._data!r}, {self._size!r})"
        types = [short_type(_element_type(v)) for v in self._data]
        size = self.size if self._is_known() else "?"
        return f"TensorArray({size} of {', '.join(types)}, capacity {self.capacity})"

    # ---------------------------------------------------------------- elements

    def read(self, index: Integer) -> E:
        """Return the element at an index. Negative indices count from the end."""
        at = self._place("read", index)
        if self._tail and isinstance(at, int) and at >= self._stored:
            return self._element(self._tail[at - self._stored])
        return self._element([v[at] for v in self._settled()])

    __getitem__ = read

    def __iter__(self) -> Iterator[E]:
        return iter(self.unstack())

    def write(self, index: Integer, element: E | ArrayLike | Tree) -> TensorArray[E]:
        """Return the array with another element at an index; zeros fill gaps before it.

        Negative indices count from the end. One before the first element is an error, at run time
        if the index or the size is not known."""
        leaves = self._leaves("write", element)
        at = self._place("write", index)
        if not isinstance(at, int) or not self._is_known():
            size = jnp.maximum(jnp.asarray(self._size, jnp.int32), jnp.asarray(at + 1, jnp.int32))
            over = jnp.int32(self.capacity + 1)  # for an index before the first
            return self._with(at, leaves, jnp.where(at < 0, over, size))
        if at >= self.capacity:
            more = _with_room(self._settled(), at + 1)
            return TensorArray._of(more, self._tree, self._size).write(at, element)
        return self._with(at, leaves, max(int(self._size), at + 1))

    def append(self, element: E | ArrayLike | Tree) -> TensorArray[E]:
        """Return the array with one more element."""
        leaves = self._leaves("append", element)
        if not self._is_known() or self._is_in_loop():
            return self._with(self._size, leaves, self._size + 1)
        size, stored = int(self._size), int(self._stored)
        new = TensorArray._of(self._data, self._tree, size + 1)
        new._stored, count = stored, size - stored
        # Arrays that result from one another in the same trace share a tail.
        goes_on = 0 < count == len(self._tail) and all(map(_jax.same_trace, leaves, self._tail[-1]))
        new._tail = self._tail if goes_on else self._tail[:count]
        new._tail.append(leaves)
        return new

    # ---------------------------------------------------------------- all elements

    def stack(self) -> E:
        """Return all elements, stacked along a new leading axis.

        If their number is not known, there are `capacity` rows, with zeros past the last element.
        """
        return self._element(self._rows())

    def concat(self) -> E:
        """Return all elements, one after the other along their leading axis."""
        for kind in map(_element_type, self._data):
            if not kind.shape:
                expected, got = "must have elements with an axis", f"elements {short_type(kind)}"
                raise _wrong(ValueError, "concat", "self", expected, got, "Use `stack`.")
        joined = lambda v: v.reshape(v.shape[0] * v.shape[1], *v.shape[2:])
        return self._element(list(map(joined, self._rows())))

    def unstack(self) -> list[E]:
        """Return all elements in a list; `capacity` of them if their number is not known."""
        count, rows = self.size if self._is_known() else self.capacity, self._rows()
        return [self._element([v[i] for v in rows]) for i in range(count)]

    # ---------------------------------------------------------------- within

    def _rows(self) -> list[Array]:
        """Return the leaves of all elements, stacked: zeros past the last if it is not known."""
        data = [jnp.asarray(v) for v in self._settled()]
        if self._is_known():
            return [v[: self.size] for v in data]
        used = jnp.arange(self.capacity, dtype=jnp.int32) < self._size
        used_of = lambda v: used.reshape(-1, *[1] * (v.ndim - 1))
        return [jnp.where(used_of(v), v, jnp.zeros_like(v)) for v in data]

    def _is_in_loop(self) -> bool:
        return isinstance(self._data[0], Buffer)

    def _is_known(self) -> bool:
        size = self._size
        is_array = isinstance(size, (jax.Array, np.ndarray, np.generic)) and size.ndim == 0
        counts = is_array and size.dtype != jax.dtypes.float0
        return isinstance(size, int) or (counts and not _jax.is_tracer(size))

    def _settled(self) -> list[Any]:
        """Return the stored elements and those of the tail, doubling the capacity if needed."""
        count = self._size - self._stored if self._tail else 0
        if not count:
            return self._data
        leaves = list(zip(self._data, zip(*self._tail[:count], strict=True), strict=True))
        part, wide = slice(self._stored, self._size), _with_room(self._data, self._size)
        data = [v.at[part].set(jnp.stack(new)) for v, (_, new) in zip(wide, leaves, strict=True)]
        # Store the result only in an array that this trace made: elsewhere, tracers would leak.
        pairs = ((v, w) for v, (old, new) in zip(data, leaves, strict=True) for w in (old, *new))
        if any(_jax.same_trace(v, w) for v, w in pairs):
            self._data, self._stored, self._tail = data, self._size, []
        return data

    def _with(self, at: Any, leaves: list[Any], size: Any) -> TensorArray[E]:
        data = [v.at[at].set(x) for v, x in zip(self._settled(), leaves, strict=True)]
        return TensorArray._of(data, self._tree, size)._checked()

    def _checked(self) -> TensorArray[E]:
        """Return the array; outside loops, raise at run time if it exceeds its capacity."""
        if self._is_in_loop() or isinstance(self._size, int):
            return self
        room, problem = self.capacity, "`append` and `write` must stay within the capacity of "
        problem += f"{room}, which is fixed in a loop and under jax.jit"
        got = "more elements, or an index before the first"
        advice = "Make the array with a larger capacity, or correct the index."
        raising = ErrorIf(errors.message(NAME, problem, got, advice))
        values, too_many = [self._size, *self._data], jnp.asarray(self._size > room)
        size, *data = error_on_use(raising, [too_many], values)
        return TensorArray._of(data, self._tree, size)

    def _place(self, method: str, index: Any) -> Any:
        """Return an index counted from the start: an int if it is known."""
        is_array = isinstance(index, (jax.Array, np.ndarray)) and not _jax.is_tracer(index)
        index = index.item() if is_array and not index.ndim else index
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            at = int(index) if index >= 0 else self.size + int(index)
            if self._is_known() and (at < 0 or (method == "read" and at >= self.size)):
                got, advice = f"{index} for {self.size} elements", "Pass 0 for the first."
                expected = "must be the index of an element"
                raise _wrong(IndexError, method, "index", expected, got, advice)
            return at
        array = isinstance(index, jax.Array)
        if not array or index.ndim or not jnp.issubdtype(index.dtype, jnp.integer):
            got = short_type(jax.typeof(index)) if array else repr(index)
            advice = "Use `stack` to read several elements."
            raise _wrong(TypeError, method, "index", "must be one integer", got, advice)
        index = index.astype(jnp.int32) if index.dtype.itemsize < 4 else index
        size = self.size if self._is_known() else self._size.astype(index.dtype)
        return jnp.where(index < 0, index + size, index)

    def _element(self, leaves: Sequence[Any]) -> Any:
        return bare(self._tree.unflatten(leaves))

    def _leaves(self, method: str, element: PyTree[Any]) -> list[Any]:
        """Check an element, and return its leaves in the stored types."""
        types = list(map(_element_type, self._data))
        first = self._tree.unflatten(types)
        element, differences = alike(first, wrapped(f"{NAME}.{method}", "element", element))
        leaves, tree = tree_flatten_with_path(element)
        advice = "Make the array with `empty` for elements like this one, or cast it."
        wrong = lambda *what, path=(): _wrong(TypeError, method, "element", *what, advice, path)
        for path, a, b in differences:
            raise wrong(f"must be {named(a)}", named(b), path=path)
        if tree != self._tree:
            raise wrong(f"must have the structure {shape_of(first)}", str(shape_of(element)))
        for (path, value), want in zip(leaves, types, strict=True):
            if value.shape != want.shape or not validate.holds(want.dtype, value):
                raise wrong(f"must be {short_type(want)}", short_type(jax.typeof(value)), path=path)
        dtypes = [want.dtype for want in types]
        return list(map(jax.lax.convert_element_type, [v for _, v in leaves], dtypes))


def _wrong(kind: type[Exception], method: str, *rest: Any) -> Exception:
    return kind(errors.wrong(f"{NAME}.{method}", *rest))


def _element_type(stored: Any) -> Any:
    return jax.ShapeDtypeStruct(stored.shape[1:], stored.dtype)


def _with_room(arrays: list[Any], rows: int) -> list[Any]:
    """Return arrays with at least so many rows: twice as many, as often as it takes."""
    old = room = arrays[0].shape[0]
    while room < rows:
        room = max(2 * room, 1)
    more = lambda v: jnp.zeros((room - old, *v.shape[1:]), v.dtype)
    return [jnp.concatenate([v, more(v)]) for v in arrays] if room > old else arrays


def is_tensor_array(value: object) -> bool:
    return isinstance(value, TensorArray)


def checked(tree: PyTree[Any]) -> Any:
    """Return the tree, with a check that its TensorArrays do not exceed their capacity."""
    check = lambda v: v._checked() if is_tensor_array(v) else v
    return jax.tree.map(check, tree, is_leaf=is_tensor_array)
