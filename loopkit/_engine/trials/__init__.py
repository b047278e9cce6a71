"""What is found out on the machine at hand, mostly by running something, once."""
