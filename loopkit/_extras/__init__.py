"""Functions made of the public loops."""
