"""Reports for users on what a program does."""
