"""A model of text that knows nothing of loopkit."""
