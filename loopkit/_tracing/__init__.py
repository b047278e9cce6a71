"""From a user's functions to a loop and its operands."""
