"""Calls of the host from within a loop, made each time that the program reaches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax._src import callback, core, dispatch, sharding_impls
from jax._src.interpreters import batching, mlir
from jax._src.lib.mlir.dialects import hlo

from loopkit._jax.avals import ShapedArray, type_like

tell_p = core.Primitive("loopkit_tell")
"""A primitive that is bound where a loop is lowered. Compilers keep it, because it has a side
effect. To JAX it has none, so that an unused loop is removed even if it shows its progress."""
tell_p.multiple_results = True
SCALAR = ShapedArray((), jnp.dtype("int32"))


def tell(host: Callable, values: Sequence[Any], results: int) -> list:
    """Call `host(site, device, *values)`, and return its results, `results` numbers of type int32.

    `site` is an object that is the same in every call from one place in a compiled program.
    `device` is the number of the calling device if each device runs its own program, else 0.
    """
    return tell_p.bind(*values, host=host, results=results)


def _types(*types: ShapedArray, results: int, **_: object) -> list:
    return [type_like(SCALAR, types)] * results


def _lower(ctx: Any, *operands: Any, host: Callable, results: int) -> Any:
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        kind = mlir.aval_to_ir_type(ctx.module_context, SCALAR)
        device = hlo.convert(kind, hlo.partition_id())
    else:
        device = mlir.ir_constant(jnp.dtype("int32").type(0))
    site, number = object(), SCALAR.dtype.type
    run = lambda *values: tuple(map(number, host(site, *map(int, values))))
    avals = [SCALAR, *ctx.avals_in]
    sharding = cast(Any, callback)._callback_op_sharding(context, None, ctx.avals_out)
    ctx = dataclasses.replace(ctx, avals_in=avals)
    given = ctx, run, None, [device, *operands], avals, ctx.avals_out
    how = {"has_side_effect": True, "returns_token": False, "sharding": sharding}
    return callback.emit_python_callback(*given, **how)[0]


def _batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
    """Call once for all lanes, with the largest values."""
    pairs = zip(args, dims, strict=True)
    outs = tell_p.bind(*(a if d is None else a.max(d) for a, d in pairs), **params)
    return outs, [None] * len(outs)


tell_p.def_impl(lambda *values, **params: dispatch.apply_primitive(tell_p, *values, **params))
tell_p.def_abstract_eval(_types)
mlir.register_lowering(tell_p, _lower, cacheable=False)
batching.primitive_batchers[tell_p] = _batched
