"""Loops in JAX: differentiable, cheap in memory, and fast."""

from loopkit import schedules as schedules
from loopkit._blocked import blocked as blocked
from loopkit._buffer import Buffer as Buffer
from loopkit._checkpointed import checkpointed as checkpointed
from loopkit._explain import Explanation as Explanation
from loopkit._explain import explain as explain
from loopkit._explain import plan as plan
from loopkit._fori_loop import fori_loop as fori_loop
from loopkit._in_place import InPlaceReport as InPlaceReport
from loopkit._in_place import assert_in_place as assert_in_place
from loopkit._in_place import in_place_report as in_place_report
from loopkit._info import LoopInfo as LoopInfo
from loopkit._lax_loops import LoopSite as LoopSite
from loopkit._plan import Plan as Plan
from loopkit._ragged import length_buckets as length_buckets
from loopkit._ragged import ragged_scan as ragged_scan
from loopkit._replace_lax_loops import replace_lax_loops as replace_lax_loops
from loopkit._scan import scan as scan
from loopkit._tensor_array import TensorArray as TensorArray
from loopkit._unbounded import unbounded_scan as unbounded_scan
from loopkit._while_loop import while_loop as while_loop

__version__ = "0.1.0"
