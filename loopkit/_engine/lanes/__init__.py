"""Loops of many lanes, which wait for each other, narrow, or advance independently."""
