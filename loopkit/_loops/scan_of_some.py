"""A scan of which not all ys are wanted, made of one that carries what is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import validate
from loopkit._loops.request import Scan
from loopkit._loops.run_scan import trace
from loopkit._loops.some_ys import CarryWithYs, SomeYs
from loopkit._types import Reduce

RunScan = Callable[[Scan], tuple[Any, Any, Any]]


def of_some(scan: Scan, every: int | None, reduce: Reduce, run: RunScan) -> tuple[Any, Any, Any]:
    """Final carry, ys, and, if it is wanted, a LoopInfo; `run` runs a scan of all its own ys."""
    all_ys = replace(scan, out_axes=0)

    def of(tree: _jax.TreeDef, types: Sequence[Any]) -> SomeYs:
        kind = every, scan.inputs.length, scan.reverse, scan.until is not None
        return SomeYs.of(tree, types, scan.out_axes, reduce, *kind)

    def in_python() -> tuple[Any, Any, Any]:
        carry, ys, info = run(replace(all_ys, return_info=True))
        leaves, tree = jax.tree.flatten(ys)
        some = of(tree, [_jax.slice_type(jax.typeof(y)) for y in leaves])
        return carry, some.of_all(leaves, int(info.steps)), info

    if scan.inputs.length and (ran := validate.in_python(in_python)) is not None:
        return ran
    loop = trace(all_ys)[0]
    some = of(loop.y_tree, loop.loop.y_types)
    both = replace(
        scan,
        names=scan.names._replace(hidden=scan.names.hidden + 1),
        out_axes=some.axes,
        some=some,
        rest=(*scan.rest, "some", some),
    )
    init = CarryWithYs(scan.carried.returned(scan.init), some.start())
    carry, ys, info = run(both.over(init, some.buffers(scan.buffers), scan.inputs))
    return carry.carry, some.result(carry.ys, ys), info
