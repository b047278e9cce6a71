"""Replace the loops of lax by loopkit's, in code that you cannot edit."""
