"""Turn a user's functions into a loop and its operands."""
