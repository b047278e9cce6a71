"""Loops of many lanes: how they wait for each other, narrow, or go on by themselves."""
