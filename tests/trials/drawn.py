"""A trial: a program, and what is done to it."""

from __future__ import annotations

from trials.compare import Trial
from trials.draws import Draws
from trials.programs import draw_program
from trials.transformations import DERIVATIVES, draw_outside, draw_pattern


def draw_trial(d: Draws) -> Trial:
    program = draw_program(d)
    pattern = draw_pattern(d, program)
    outside = draw_outside(d, program, pattern)
    differentiated = bool(set(pattern) & set(DERIVATIVES))
    return Trial(program, pattern, outside, d.chance(3), not differentiated or d.chance(40))
