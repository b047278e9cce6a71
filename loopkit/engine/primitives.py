"""The six primitives, by name. Each has a file: what it computes and how it is transformed.

With y = f(theta) for a loop, theta its constants, initial carry and xs, L its Jacobian and D its
dual loop (the same loop over values and tangents):

    while        f(theta)
    dual         f(theta), L t              forward mode: one loop
    forward      f(theta), checkpoints      the known half of `dual`
    pushforward  L t                        the linear half; transpose: pullback
    pullback     L^T w, from checkpoints    transpose: pushforward
    hessian      d/dtheta <w, L u>          its own transpose in u

D is a loop itself, so derivatives of any order are the same six on a longer carry.
"""

from __future__ import annotations

from loopkit import _jax

while_p = _jax.declare("loopkit_while")
dual_p = _jax.declare("loopkit_dual")
forward_p = _jax.declare("loopkit_forward")
pushforward_p = _jax.declare("loopkit_pushforward")
pullback_p = _jax.declare("loopkit_pullback")
hessian_p = _jax.declare("loopkit_hessian")
