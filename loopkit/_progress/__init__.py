"""How far a loop is: what a compiled loop knows of that, and the bars that are open."""
