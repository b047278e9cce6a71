"""The types of values and of JAX's own objects, and facts about tracers."""

from __future__ import annotations

import functools as ft
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Protocol, cast
from typing import TypeAlias as Alias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config, core
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lib import Device as Device
from jax._src.lib import pytree
from jaxtyping import Array, Int, PyTree

ShapedArray = core.ShapedArray
Literal = core.Literal
Zero = ad.Zero
add_tangents = ad.add_tangents
broadcast = batching.broadcast
instantiate = ad.instantiate_zeros
is_symbolic = core.is_symbolic_dim
is_undefined = ad.is_undefined_primal
pvary_p = core.pvary_p
same_type = core.typematch


def asked_for(cts: Sequence[Any], operands: Sequence[Any]) -> list:
    """Return a transpose's cotangents of all operands, given the last ones; None if not needed."""
    cts = [*[None] * (len(operands) - len(cts)), *cts]
    return [ct if is_undefined(v) else None for ct, v in zip(cts, operands, strict=True)]


def stack_type(aval: ShapedArray, size: int, axis: int = 0) -> ShapedArray:
    """Return the type of `size` values of type `aval`, stacked."""
    return cast(ShapedArray, core.unmapped_aval(size, axis, aval))


def stack_types(avals: Sequence[ShapedArray], size: int | None) -> list[ShapedArray]:
    """Return the types with a leading axis of this size; unchanged if it is None."""
    return [t if size is None else stack_type(t, size) for t in avals]


def slice_type(aval: ShapedArray, axis: int = 0) -> ShapedArray:
    """Return the type of one slice along `axis`."""
    return cast(ShapedArray, core.mapped_aval(aval.shape[axis], axis, aval))


def zeros(aval: ShapedArray) -> jax.Array:
    """Return zeros of a type, with its varying manual axes; for PRNG keys, keys of zero bits."""
    if is_spread(aval) and jax.sharding.get_abstract_mesh().empty:
        with jax.sharding.use_abstract_mesh(aval.sharding.mesh):  # else the layout is dropped
            return zeros(aval)
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return ad.zeros_like_aval(aval)
    bits = ad.zeros_like_aval(core.physical_aval(aval))
    keys = jax.random.wrap_key_data(bits, impl=aval.dtype._impl.name)
    return vary_like(keys, [aval])


def varying(aval: ShapedArray) -> frozenset[str]:
    """Return the manual mesh axes over which a value of this type differs between devices."""
    return frozenset(aval.manual_axis_type.varying)


def is_spread(aval: ShapedArray) -> bool:
    """Return whether the type says how values are laid out over devices."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def on_devices(aval: ShapedArray) -> Any:
    """Return the type with real devices in its mesh, so that a program can be compiled for it."""
    if not is_spread(aval) or not jax.sharding.get_abstract_mesh().empty:
        return aval
    mesh = aval.sharding.mesh
    devices = np.asarray(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    placed = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    where = jax.sharding.NamedSharding(placed, aval.sharding.spec)
    weak = aval.weak_type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=weak)


def vary_like(value: Any, avals: Sequence[ShapedArray]) -> Any:
    """Return `value`, made to vary over every manual axis over which one of `avals` does."""
    axes = frozenset().union(*map(varying, avals)) - varying(jax.typeof(value))
    return core.pvary(value, tuple(sorted(axes))) if axes else value


def barrier(values: PyTree[Any]) -> Any:
    """Return a tree of values behind `lax.optimization_barrier`, with unchanged types.

    On jax 0.10 a single barrier makes all values vary over each axis over which one of them does.
    """
    leaves, tree = jax.tree.flatten(values)
    axes = [varying(jax.typeof(v)) for v in leaves]
    for alike in dict.fromkeys(axes):
        places = [i for i, a in enumerate(axes) if a == alike]
        held = jax.lax.optimization_barrier([leaves[i] for i in places])
        for i, v in zip(places, held, strict=True):
            leaves[i] = v
    return jax.tree.unflatten(tree, leaves)


def type_like(aval: ShapedArray, avals: Sequence[ShapedArray]) -> ShapedArray:
    """Return `aval`, varying over every manual axis over which one of `avals` does."""
    for other in avals:
        if varying(other) - varying(aval):
            if aval.sharding.mesh.empty:
                spec = jax.sharding.PartitionSpec(*[None] * aval.ndim)
                aval = aval.update(sharding=other.sharding.update(spec=spec))
            manual = aval.manual_axis_type
            axes = manual.varying | varying(other)
            aval = aval.update(manual_axis_type=manual.update(varying=axes))
    return aval


def broadcast_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return a value in the shape of another, and in its layout over devices if its type has
    one."""
    aval = jax.typeof(like)
    made = jnp.broadcast_to(value, aval.shape)
    return jax.sharding.reshard(made, aval.sharding) if is_spread(aval) else made


def move(
    value: jax.typing.ArrayLike, source: int | None, target: int | None, size: int, over: Any = None
) -> Any:
    """Return `value` with its batch axis moved, or added (over the mesh axis `over`, if any)."""
    if target is None:
        assert source is None, "a batched operand of a leaf that is not batched"
        return value
    if source is None and over is not None:
        return broadcast(value, size, target, over)
    if source is None:
        shape = list(jnp.shape(value))
        shape.insert(target, size)
        return jnp.broadcast_to(jnp.expand_dims(value, target), shape)
    return jnp.moveaxis(value, source, target)


def type_of_part(aval: ShapedArray, shape: tuple[int, ...]) -> ShapedArray:
    """Return the type of a part of an array, laid out like the array along axes that it has whole.

    `shape` is that of the part, perhaps with more leading axes.
    """
    part, more = ShapedArray(shape, aval.dtype), len(shape) - aval.ndim
    if not is_spread(aval):
        return part
    triples = zip(aval.sharding.spec, aval.shape, shape[more:], strict=True)
    spec = [None] * more + [place if n == size else None for place, n, size in triples]
    spec = jax.sharding.PartitionSpec(*spec)
    return part.update(sharding=aval.sharding.update(spec=spec))


def gathered(value: jax.Array, axes: int) -> jax.Array:
    """Return a value that is not divided between devices along its first `axes` axes."""
    aval = jax.typeof(value)
    spec = jax.sharding.PartitionSpec(*[None] * axes, *aval.sharding.spec[axes:])
    return (
        jax.sharding.reshard(value, aval.sharding.update(spec=spec)) if is_spread(aval) else value
    )


def is_differentiable(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def float0_zero(aval: ShapedArray) -> Zero:
    """Return the symbolic zero in the tangent space of `aval`."""
    return Zero(aval.to_tangent_aval())


def nonzero(tangents: Sequence[Any]) -> list[bool]:
    """Mark the tangents that are not symbolic zeros."""
    return [type(t) is not Zero for t in tangents]


@ft.lru_cache(256)
def of_shape(aval: ShapedArray, shape: tuple[int, ...]) -> ShapedArray:
    return aval.update(shape=shape)


SYMBOLIC = 16
"""The assumed size of an axis of symbolic size (jax.export), in estimates of bytes and times."""


def elements(aval: ShapedArray) -> int:
    """Return the number of elements of a value of this type; one, if it is not an array."""
    return volume(getattr(aval, "shape", ()))


def volume(axes: Iterable[Any]) -> int:
    return prod(n if isinstance(n, int) else SYMBOLIC for n in axes)


def byte_count(*avals: ShapedArray) -> int:
    return sum(elements(t) * getattr(t.dtype, "itemsize", 8) for t in avals)


def is_tracer(value: object) -> bool:
    return isinstance(value, core.Tracer)


def innermost(value: Any) -> Any:
    """Return the value below the tracers of `jax.vmap` and of derivatives, batch axes included."""
    while isinstance(value, (batching.BatchTracer, ad.JVPTracer, ad.LinearizeTracer)):
        value = value.val if isinstance(value, batching.BatchTracer) else value.primal
    return value


def known(value: Any) -> Any:
    """Return a value, or the literal that a tracer stands for; None if it is not known."""
    if is_tracer(value):
        value = getattr(value, "val", None)
        return value.val if isinstance(value, Literal) else None
    return None if is_symbolic(value) else value


def origin(tracer: object) -> Any:
    """Return the value of a tracer of `jit`, or the equation that makes it, or None.

    The equation has tracers as operands, and comes with the index of the tracer in its results.
    """
    if not isinstance(tracer, pe.DynamicJaxprTracer):
        return None
    value = core.full_lower(tracer)
    if value is not tracer:
        return value
    eqn = tracer.parent
    return None if eqn is None else (eqn, [v is tracer.val for v in eqn.outvars].index(True))


def as_array(value: object) -> Any:
    """Return a JAX value as lax would see it: numpy and Python scalars become (weakly typed)
    arrays."""
    if isinstance(value, (core.Tracer, jax.Array)):
        return value
    return jnp.asarray(value)


def as_type(value: Any, aval: ShapedArray) -> Any:
    """Return a value in the type that a loop carries, which may not be weak, or may vary more."""
    have = jax.typeof(value)
    if have.dtype != aval.dtype or (have.weak_type and not aval.weak_type):
        value = jax.lax.convert_element_type(value, aval.dtype)
    return vary_like(value, [aval])


def weak_as(value: Any, aval: ShapedArray) -> Any:
    """Return a value with a weak type if `aval` is weak, so that it promotes no other type."""
    how = {"new_dtype": aval.dtype, "weak_type": True, "sharding": None}
    return jax.lax.convert_element_type_p.bind(value, **how) if aval.weak_type else value


def same_trace(a: object, b: object) -> bool:
    """Return whether two values belong to the same trace, so that one may take the other's
    place."""
    return getattr(a, "_trace", None) is getattr(b, "_trace", None)


def put_beside(rows: np.ndarray[Any, Any] | jax.Array, other: jax.Array) -> jax.Array:
    """Put rows on the device of another array, in a third of the time of `jax.device_put`."""
    aval = of_shape(jax.typeof(other), rows.shape)
    where = other.sharding, [rows], [other.device], other.committed
    with config.explicit_device_put_scope():
        return pxla.batched_device_put(aval, *where)


def known_on(meshes: Sequence[Any], values: list) -> list:
    """Return the values, with a layout left open on a mesh that loops name inside, to show it to
    `jax.jit`."""
    if not meshes or not values or not jax.sharding.get_abstract_mesh().empty:
        return values
    anyhow = [jax.sharding.PartitionSpec.UNCONSTRAINED] * jnp.ndim(values[0])
    sharding = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec(*anyhow))
    return [jax.lax.with_sharding_constraint(values[0], sharding), *values[1:]]


AxisData: Alias = batching.AxisData
"""The axis that a rule for `jax.vmap` gets."""
LoweringContext: Alias = mlir.LoweringRuleContext
Primitive: Alias = core.Primitive
TreeDef: Alias = pytree.PyTreeDef
Whole: Alias = int | Int[Array, ""]
"""A whole number, known or traced."""


class Atom(Protocol):
    """A variable or a literal that an equation reads, with a narrower type than JAX declares."""

    aval: ShapedArray


Var: Alias = Atom
"""A variable that an equation makes, or that a jaxpr has as an input."""


class Equation(Protocol):
    primitive: Primitive
    invars: list[Atom]
    outvars: list[Var]
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    def replace(self, **changes: Any) -> Equation: ...


class OpenJaxpr(Protocol):
    """Equations and variables, without constants."""

    constvars: list[Var]
    invars: list[Var]
    outvars: list[Atom]
    eqns: Sequence[Equation]
    effects: Any
    debug_info: Any
    is_high: bool

    def replace(self, **changes: Any) -> Any: ...


def variables(values: Iterable[Atom]) -> list[Var]:
    """Return the variables among values, without literals."""
    return [v for v in values if not isinstance(v, Literal)]
