"""Jaxprs: looking into them, rewriting them, weighing them. Nothing here knows of loops."""
