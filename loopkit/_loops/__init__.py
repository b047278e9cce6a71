"""The loops that users call."""
