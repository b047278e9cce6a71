"""Plans: what a backward pass keeps, from a budget."""
