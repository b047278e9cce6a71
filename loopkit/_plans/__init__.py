"""Plans: what a backward pass keeps within a budget."""
