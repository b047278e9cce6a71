"""The only door to JAX's semi-public interfaces.

Everything in this folder works on jax 0.10.2 and on the newest release; where the two differ, the
difference is absorbed here. A `Jaxpr` is always closed and has no constants: what a function closes
over has become leading arguments.
"""

from jax._src.array import ArrayImpl
from jax._src.debugging import debug_callback_p
from jax._src.literals import TypedNdArray
from jax._src.tree_util import broadcast_prefix, equality_errors_pytreedef

from loopkit._jax.avals import (
    SYMBOLIC,
    Literal,
    ShapedArray,
    Zero,
    add_tangents,
    as_array,
    asked_for,
    barrier,
    broadcast,
    broadcast_like,
    byte_count,
    elements,
    float0_zero,
    gathered,
    innermost,
    instantiate,
    is_differentiable,
    is_spread,
    is_symbolic,
    is_tracer,
    is_undefined,
    known,
    known_on,
    nonzero,
    of_shape,
    origin,
    put_beside,
    pvary_p,
    same_trace,
    same_type,
    slice_type,
    stack_type,
    stack_types,
    type_like,
    type_of_part,
    vary_like,
    varying,
    volume,
    weak_as,
    zeros,
)
from loopkit._jax.callbacks import tell
from loopkit._jax.jaxprs import (
    COMPARED,
    IO_EFFECTS,
    Jaxpr,
    JaxprInputEffect,
    axis,
    batch_jaxpr,
    batched_call,
    bind_equation,
    call_jaxpr,
    check_effects,
    close_jaxpr,
    context_of,
    dce,
    is_laid_out,
    is_tracing,
    jit_is_disabled,
    jvp_in_moving,
    jvp_jaxpr,
    like,
    make_jaxpr_effects,
    open_jaxpr,
    rearranged,
    trace,
    trace_closed,
    trace_context,
    unknown_outputs,
    used_inputs,
    vmapped_axes,
    with_custom_rules,
    with_outputs,
)
from loopkit._jax.lax_loops import (
    SCAN_KEEPS_RULES,
    is_settled,
    lax_scan_p,
    lax_while_p,
    lower_as_written,
    noting,
    replacing,
    scan_counts,
    steps_of,
    trace_bodies_within,
    with_steps,
)
from loopkit._jax.memory import (
    blank,
    blank_on_host,
    blank_p,
    check_spread_on_host,
    is_on_host,
    named_on_host,
    on_host,
    placed,
)
from loopkit._jax.next_jax import (
    hi_primitive_p,
    is_object,
    is_scan3,
    name_of_primitive,
    scan_as_primitive,
    with_params,
)
from loopkit._jax.policies import asked_names, checkpoint_name, held_by, may_save, name_of, offloads
from loopkit._jax.primitives import (
    KEEPS_BARRIERS,
    as_there,
    declare,
    define,
    evaluations,
    host_waits,
    keeps_barriers,
    lower_by,
    named_results,
    new_equation,
    register_batching,
    register_bounds,
    register_known_part,
    register_partial_eval,
    target_device,
)
from loopkit._jax.references import has_references, is_reference, of_values, type_in
from loopkit._jax.sources import (
    PACKAGE,
    is_raised_within,
    name_stack,
    source,
    source_of,
)
from loopkit._jax.types import (
    Atom,
    AxisData,
    Device,
    Equation,
    LoweringContext,
    OpenJaxpr,
    Primitive,
    TreeDef,
    Var,
    Whole,
)
