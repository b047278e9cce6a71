"""What a program does, for users to read."""
