"""Derivatives of steps, the reversal of loops, and memory budgets for whole programs."""
