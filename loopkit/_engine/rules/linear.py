"""Rules of the primitives that are linear in their last operands.

No cotangent, or no tangent, is not one of zeros: results that only those reach are symbolic zeros,
and what reaches no result that is used is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loopkit import _jax
from loopkit._engine.facts.activity import cotangent_activity, linear_activity
from loopkit._engine.loop import Active, Loop, kept, spread
from loopkit._engine.primitives import pullback_p, pushforward_p


@dataclass(frozen=True)
class Linear:
    """L or its transpose, as a map from one side of the active leaves to the other."""

    primitive: Any
    ins: str
    outs: str
    reached: Callable[[Loop, Active, Sequence[bool]], Active]
    """The leaves that some of the values that go in reach."""
    needed: Callable[[Loop, Active, Sequence[bool]], Active]
    """The leaves that some of the values that come out need."""
    out_types: Callable[[Loop, Active], list]

    def types(
        self, *_: object, loop: Loop, active: Active, batch: int | None, **__: object
    ) -> tuple[list, Any]:
        """Result types, of values with a leading batch, if there is one; and the effects."""
        types = _jax.stack_types(self.out_types(loop, active), batch)
        return types, loop.without_debug_effects().effects

    def of(self, known: Sequence[Any], values: Sequence[Any], params: dict[str, Any]) -> list:
        """The map of values of which some are symbolically zero."""
        active = params["active"]
        live = self.reached(params["loop"], active, _jax.nonzero(values))
        zeros = list(map(_jax.float0_zero, self.types(**params)[0]))
        if not any(live.inputs):
            return zeros
        moving = kept(values, kept(getattr(live, self.ins), getattr(active, self.ins)))
        moving = map(_jax.instantiate, moving)
        out = self.primitive.bind(*known, *moving, **dict(params, active=live))
        return spread(out, kept(getattr(live, self.outs), getattr(active, self.outs)), zeros)

    def dce(self, used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
        """Without the values that reach none of the used results."""
        if not any(used):
            return [False] * len(eqn.invars), None
        active = eqn.params["active"]
        live = self.needed(eqn.params["loop"], active, used)
        reaching, found = (
            kept(getattr(live, side), getattr(active, side)) for side in (self.ins, self.outs)
        )
        if any(u and not f for u, f in zip(used, found, strict=True)):
            return [True] * len(eqn.invars), eqn
        ins = [True] * (len(eqn.invars) - len(reaching)) + reaching
        invars, outvars = kept(eqn.invars, ins), kept(eqn.outvars, found)
        params = dict(eqn.params, active=live)
        return ins, _jax.new_equation(eqn, self.primitive, invars, outvars, params)


def linear_params(loop: Loop, layout: Active, active: Active) -> dict[str, Any]:
    """Return the parameters of a `pushforward` from what a loop has saved for some leaves."""
    params = {"loop": loop, "layout": layout, "active": active}
    return {**params, "batch": None, "transpose_only": False}


def asked(cts: Sequence[Any], operands: Sequence[Any]) -> list:
    """Return for `transpose` the cotangents of the last operands, as far as they are asked for."""
    cts = [*[None] * (len(operands) - len(cts)), *cts]
    return [ct if _jax.is_undefined(v) else None for ct, v in zip(cts, operands, strict=True)]


by_tangents, by_cotangents = linear_activity, cotangent_activity
FORWARD = Linear(pushforward_p, "inputs", "outputs", by_tangents, by_cotangents, Loop.output_types)
BACKWARD = Linear(pullback_p, "outputs", "inputs", by_cotangents, by_tangents, Loop.input_types)
