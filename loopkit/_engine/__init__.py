"""The engine: six primitives on one description of a loop. See docs/design.md."""
