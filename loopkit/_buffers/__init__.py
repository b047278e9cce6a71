"""Buffers: what users read and write, and the two primitives that do it in place."""
