"""Arguments, and what is said when something is wrong: at once, or when a program runs."""
