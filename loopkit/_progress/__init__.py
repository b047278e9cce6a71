"""Progress: what a compiled loop knows of how far it is, and the open bars."""
