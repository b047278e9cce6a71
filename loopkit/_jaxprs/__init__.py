"""Analyse, rewrite and price jaxprs. No file here depends on the engine."""
