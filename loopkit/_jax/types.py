"""What JAX's own objects are called in signatures, and as how much of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from typing import TypeAlias as Alias

from jax._src import core
from jax._src.interpreters import batching, mlir
from jax._src.lib import Device as Device
from jax._src.lib import pytree
from jaxtyping import Array, Int

from loopkit._jax.avals import ShapedArray

AxisData: Alias = batching.AxisData
"""What a rule for `jax.vmap` is told of the axis."""
LoweringContext: Alias = mlir.LoweringRuleContext
Primitive: Alias = core.Primitive
TreeDef: Alias = pytree.PyTreeDef
Whole: Alias = int | Int[Array, ""]
"""A whole number, known or traced."""


class Atom(Protocol):
    """What an equation reads: a variable, or a literal. JAX says less of its type than is known."""

    @property
    def aval(self) -> ShapedArray: ...


Var: Alias = Atom
"""What an equation makes, or a jaxpr is given."""


class Equation(Protocol):
    @property
    def primitive(self) -> Primitive: ...
    @property
    def invars(self) -> list[Atom]: ...
    @property
    def outvars(self) -> list[Var]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...
    def replace(self, **changes: Any) -> Equation: ...


class OpenJaxpr(Protocol):
    """Equations and variables, without constants."""

    @property
    def constvars(self) -> list[Var]: ...
    @property
    def invars(self) -> list[Var]: ...
    @property
    def outvars(self) -> list[Atom]: ...
    @property
    def eqns(self) -> Sequence[Equation]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def debug_info(self) -> Any: ...
    def replace(self, **changes: Any) -> Any: ...
