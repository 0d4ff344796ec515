"""Consumers that stand still, and the metrics of the whole installation."""
