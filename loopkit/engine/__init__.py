"""The engine: six primitives on one description of a loop. See docs/design.md."""

from loopkit.engine import dual as dual
from loopkit.engine import forward as forward
from loopkit.engine import hessian as hessian
from loopkit.engine import pullback as pullback
from loopkit.engine import pushforward as pushforward
from loopkit.engine import while_ as while_
