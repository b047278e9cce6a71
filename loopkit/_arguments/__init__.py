"""Arguments, and the errors about them: at once, or when a program runs."""
