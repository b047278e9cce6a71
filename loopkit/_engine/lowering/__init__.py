"""What the compiler of one platform needs of loops, and what a machine has room for."""
