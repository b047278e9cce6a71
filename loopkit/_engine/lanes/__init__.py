"""Loops of many lanes: how lanes wait for each other, narrow, or go on by themselves."""
