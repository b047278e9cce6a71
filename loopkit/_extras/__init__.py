"""Functions built on the loops."""
