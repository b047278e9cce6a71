"""Buffers that users read and write, and the two primitives that do so in place."""
