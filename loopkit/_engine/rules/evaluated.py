"""evaluated: what computes a loop, or its derivative.

operands  those of its jaxpr
results   those of its jaxpr
JVP       none: it is made where no derivative is asked for any more
"""

from __future__ import annotations

from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.lowering.flat_values import of_vectors
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.primitives import evaluated_p


def evaluate(*values: jax.Array, jaxpr: _jax.Jaxpr, **_: object) -> list:
    return list(_jax.call_jaxpr(jaxpr)(*values))


def result_types(*_: object, jaxpr: _jax.Jaxpr, **__: object) -> tuple[list, Any]:
    return list(jaxpr.out_avals), jaxpr.effects


_jax.define(evaluated_p, evaluate, result_types, on_cpu=with_scratch, on_tpu=of_vectors)
