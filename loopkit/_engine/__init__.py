"""The engine: six primitives on one description of a loop. docs/design.md describes it."""
