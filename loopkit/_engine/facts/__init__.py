"""Facts about a loop, found in its equations."""
