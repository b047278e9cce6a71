"""The engine: six primitives that share one description of a loop (see docs/design.md)."""
