"""Loops made of loops: the same results by other steps."""
