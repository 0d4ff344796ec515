"""Reward functions: pure functions of a closed trajectory."""
