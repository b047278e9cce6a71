"""What is found out about a loop from its equations."""
