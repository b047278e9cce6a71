"""Types: names for JAX's own objects in signatures, with as much of them as is used."""

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
"""The axis that a rule for `jax.vmap` is given."""
LoweringContext: Alias = mlir.LoweringRuleContext
Primitive: Alias = core.Primitive
TreeDef: Alias = pytree.PyTreeDef
Whole: Alias = int | Int[Array, ""]
"""A whole number, known or traced."""


class Atom(Protocol):
    """A variable or a literal that an equation reads. JAX says less of its type than is known."""

    @property
    def aval(self) -> ShapedArray: ...


Var: Alias = Atom
"""A variable that an equation makes, or that a jaxpr has as an input."""


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
