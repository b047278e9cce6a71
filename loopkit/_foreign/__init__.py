"""Loops of lax, in code that one cannot edit, as loopkit's."""
