"""Whether the step that makes a check is taken.

taken (condition) -> condition

Every condition that may raise an error at run time passes through this primitive. A loop whose
steps may be taken in vain, as by lanes that have stopped, finds it there, and makes the condition
false in such a step (`_engine/lanes/vain_steps.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax

taken_p = _jax.declare("loopkit_taken")


def if_taken(condition: jax.typing.ArrayLike) -> Any:
    """Return a condition, which loops around make false in steps that are not taken."""
    return taken_p.bind(condition)[0]


def _types(condition: _jax.ShapedArray) -> tuple[list, Any]:
    return [condition], set()


def _jvp(primals: Sequence[Any], _: Sequence[Any]) -> tuple[list, list]:
    outs = taken_p.bind(*primals)
    return outs, [_jax.float0_zero(jax.typeof(v)) for v in outs]


def _batched(_: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any]) -> tuple:
    return taken_p.bind(*args), dims


def _alone(_: object, evaluate: Any, condition: jax.typing.ArrayLike) -> list:
    return evaluate(condition)


_jax.define(taken_p, lambda condition: [condition], _types, jvp=_jvp, run=_alone)
_jax.register_batching(taken_p, _batched)
