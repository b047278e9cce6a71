"""The forward and the backward sweep of a loop under differentiation."""
