"""Loops in JAX: differentiable, cheap in memory, and fast."""

from loopkit import schedules as schedules
from loopkit._arguments.failed_step import replay as replay
from loopkit._buffers.buffer import Buffer as Buffer
from loopkit._buffers.tensor_array import TensorArray as TensorArray
from loopkit._engine import rules as _rules  # noqa: F401  # registers the primitives
from loopkit._extras.best_unroll import best_unroll as best_unroll
from loopkit._extras.blocked import blocked as blocked
from loopkit._extras.ragged import length_buckets as length_buckets
from loopkit._extras.ragged import ragged_scan as ragged_scan
from loopkit._extras.unbounded import unbounded_scan as unbounded_scan
from loopkit._foreign.checkpointed import checkpointed as checkpointed
from loopkit._foreign.lax_loop import LoopSite as LoopSite
from loopkit._foreign.replace import replace_lax_loops as replace_lax_loops
from loopkit._loops.scan import scan as scan
from loopkit._loops.while_loops import fori_loop as fori_loop
from loopkit._loops.while_loops import while_loop as while_loop
from loopkit._plans.plan import Plan as Plan
from loopkit._reports.explain import Explanation as Explanation
from loopkit._reports.explain import explain as explain
from loopkit._reports.in_place import InPlaceReport as InPlaceReport
from loopkit._reports.in_place import in_place_report as in_place_report
from loopkit._tracing.spec import LoopInfo as LoopInfo

__version__ = "0.1.0"
