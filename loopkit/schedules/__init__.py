"""Checkpoint schedules in pure integers: where to save, what to drop, how to reverse."""

from loopkit.schedules import binomial as binomial
from loopkit.schedules import online as online
from loopkit.schedules import reversal as reversal
