"""Jaxprs: looking into them, rewriting them, weighing them. No file here knows of loops."""
