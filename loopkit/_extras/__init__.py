"""Functions that are made of the public loops."""
