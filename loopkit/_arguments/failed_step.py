"""Errors about a step whose results are not finite, and the arguments to run that step alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from loopkit._arguments import errors
from loopkit._arguments.static_leaves import bare


@dataclass(frozen=True)
class Watched:
    """A loop whose steps are watched, as errors describe it."""

    function: str
    argument: str
    """The argument that is the loop's body."""
    body: str
    """The name of the user's body; empty for a loop of lax."""
    place: str
    """The file and the line of the body."""
    style: str
    """The arguments of the body: "carry", "carry, x" or "i, carry"."""
    carry: Any
    """The tree of the carry and of its hidden part."""
    x: Any
    """The tree of x and, for each leaf, whether each step gets it whole; None if there is no x."""
    beside: bool = False
    """Whether the loop carries the user's carry together with some of the ys."""
    missing: tuple[tuple[int, tuple[int, ...], Any], ...] = ()
    """The indices, shapes and dtypes of buffers in the carry, too large to keep at each step."""


def named(function: Callable[..., Any], otherwise: str) -> tuple[str, str]:
    """Return the name of a function (`otherwise` if that is no identifier), its file and line."""
    while inner := getattr(function, "__wrapped__", None) or getattr(function, "func", None):
        function = inner
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", otherwise)
    if code is None:  # a callable object
        code = getattr(type(function).__call__, "__code__", None) if callable(function) else None
    place = "an unknown place" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return (name if name.isidentifier() else otherwise), place


class Failed(NamedTuple):
    """The step that failed last."""

    loop: Watched
    keys: Sequence[Any]
    """The implementation of random keys for each leaf that holds keys, else None."""
    carry: Sequence[Any]
    x: Sequence[Any]


_last: list[Failed] = []


class Bad(NamedTuple):
    """A checked leaf, a mask of the lanes in which it failed, and its value."""

    name: str
    failed: Any
    value: Any


def describe(
    loop: Watched, kinds: Sequence[str], bad: Sequence[Bad], step: object
) -> tuple[str, Any]:
    """Return the message of the error, and the first lane that fails."""
    first = next(b for b in bad if b.failed.any())
    lanes = list(map(tuple, np.argwhere(first.failed)))
    lane = tuple(map(int, lanes[0]))
    number = int(_of_lane(step, lane))
    value = _of_lane(first.value, lane)
    nans = np.isnan(value)
    index = tuple(map(int, np.argwhere(nans if nans.any() else ~np.isfinite(value))[0]))
    what = f"{'nan' if nans.any() else 'inf'}{f' at index {list(index)}' if index else ''}"
    backward = kinds.count("cotangent") % 2 == 1
    kind = " of the ".join([*reversed(kinds), "value"] if not kinds else reversed(kinds))
    others = [b.name for b in bad if b is not first and b.failed.any()]
    also = f", and {_listed(others)}" if others else ""
    where = "" if not lane else f" in {_lanes(lanes)}"
    advice, body = _alone(loop, kinds, backward)
    direction = "backward" if backward else "forward"
    got = f"{what} in step {number}{where}, going {direction}, in {body} at {loop.place}"
    advice = f"{advice} Steps are counted from 0."
    problem = f"the {kind} of {first.name}{also} must stay finite"
    return errors.message(loop.function, problem, got, advice), lane


def _alone(loop: Watched, kinds: Sequence[str], backward: bool) -> tuple[str, str]:
    """Return how to run the step alone, and what to call its body."""
    if not loop.body:
        leaves = "carry" if loop.x is None else "carry and x"
        advice = f"Look at the leaves of the {leaves} before that step: `loopkit.replay()`."
        return advice, f"the {loop.argument}"
    called = "" if loop.body == loop.argument else f", which is `{loop.body}`"
    run = f"`{loop.body}(*loopkit.replay())`"
    if kinds:
        run = f"`{'jax.vjp' if backward else 'jax.jvp'}` of `{loop.body}` at `loopkit.replay()`"
    advice = f"Run that step alone, with jax.debug_nans or in a debugger: {run}."
    return advice, f"`{loop.argument}`{called}"


def _lanes(lanes: list) -> str:
    shown = [int(n[0]) if len(n) == 1 else tuple(map(int, n)) for n in lanes[:8]]
    more = f" and {len(lanes) - 8} more" if len(lanes) > 8 else ""
    return f"lane{'s' * (len(lanes) > 1)} {', '.join(map(str, shown))}{more}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _of_lane(value: Any, lane: tuple[int, ...]) -> Any:
    """Return the value of one lane; an axis of lanes has size 1 if all lanes share the value."""
    pairs = zip(lane, np.shape(value), strict=False)
    return np.asarray(value)[tuple(0 if size == 1 else i for i, size in pairs)]


def keep(loop: Watched, keys: Sequence[Any], lane: Any, carry: Sequence, x: Sequence) -> None:
    failed = Failed(loop, keys, *([_of_lane(v, lane) for v in values] for values in (carry, x)))
    _last[:] = [failed]


def replay() -> tuple[Any, ...]:
    """Return the arguments of the body in the step of a `debug="finite"` loop that failed last.

    `body(*loopkit.replay())` takes that step alone: in Python, for a debugger, or under
    `jax.debug_nans`, which finds the operation.

    **Arguments:**

    None.

    **Returns:**

    The arguments of the body, a tuple: `(carry, x)` of a scan, `(carry,)` of a `while_loop`,
    `(i, carry)` of a `fori_loop`. If the loop failed going backward, they are those of the step
    with the first cotangent that is not finite. Under `jax.vmap`, they are those of the first lane
    that failed. For a loop of lax in `loopkit.checkpointed` or `loopkit.replace_lax_loops`, `carry`
    and `x` are lists of leaves. A buffer is not kept at each step; a `jax.ShapeDtypeStruct` takes
    its place.

    **Raises:**

    `RuntimeError` if no loop has failed in this process.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import loopkit

        def step(x, scale):
            return jnp.log(x) * scale, None

        try:
            jax.block_until_ready(loopkit.scan(step, 9.0, jnp.ones(5), debug="finite"))
        except Exception as error:
            print("in step 3" in str(error))  # True

        x, scale = loopkit.replay()
        print(x < 0)  # True
        ```
    """
    if not _last:
        raise RuntimeError(
            'loopkit.replay: a loop with `debug="finite"` must have failed in this process. Pass '
            "that to the loop, and wait for its result with jax.block_until_ready. Got: no failure."
        )
    return _arguments(_last[0])


def _arguments(failed: Failed) -> tuple:
    loop, count = failed.loop, len(failed.carry)
    values = [
        jax.random.wrap_key_data(v, impl=impl) if impl is not None else jax.numpy.asarray(v)
        for v, impl in zip((*failed.carry, *failed.x), failed.keys, strict=True)
    ]
    held, types = iter(values[:count]), {i: type_of for i, *type_of in loop.missing}
    leaves = [
        jax.ShapeDtypeStruct(*types[i]) if i in types else next(held)
        for i in range(count + len(types))
    ]
    carry, hidden = loop.carry.unflatten(leaves)
    if loop.style == "i, carry":
        (i, *_), carry = carry
        return i, bare(carry)
    if loop.style == "carry":
        return (bare(carry),)
    tree, whole = loop.x
    slices, others = iter(values[count:]), iter(hidden.whole)
    x = tree.unflatten(next(others) if given else next(slices) for given in whole)
    return bare(carry.carry if loop.beside else carry), bare(x)
