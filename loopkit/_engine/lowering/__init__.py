"""Lowering of loops as one platform's compiler needs it, and the room that a machine has."""
