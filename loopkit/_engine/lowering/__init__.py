"""Lowering of loops as one platform's compiler needs it, and the memory of this machine."""
