"""What is found out by running something, once for each machine."""
