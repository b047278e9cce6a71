"""The derivative of a step, in two halves, and how a loop is reversed with them."""
