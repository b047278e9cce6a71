"""Random programs with loops in them, compared with the same programs in Python."""
