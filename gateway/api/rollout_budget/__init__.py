"""Compute the rollout budget of a run: requested replacements and free staleness capacity."""
