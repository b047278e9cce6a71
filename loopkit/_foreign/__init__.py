"""Replace lax's loops with loopkit's, in code that you cannot edit."""
