"""Lowering of loops for one platform's compiler, and the memory of this machine."""
