"""Facts of a loop, found in its equations."""
