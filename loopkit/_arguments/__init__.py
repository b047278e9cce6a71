"""Checks of arguments, and errors, raised at once or when a program runs."""
