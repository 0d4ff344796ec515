"""Stalled consumers, and the metrics of the whole installation."""
