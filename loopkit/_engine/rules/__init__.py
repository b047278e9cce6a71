"""The rules of the primitives: how each is computed and transformed, and what they share."""

from loopkit._engine.rules import forward as forward
from loopkit._engine.rules import hessian as hessian
from loopkit._engine.rules import linear as linear
from loopkit._engine.rules import onto as onto
from loopkit._engine.rules import vmap as vmap
from loopkit._engine.rules import while_ as while_
