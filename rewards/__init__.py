"""Reward functions: pure, of a closed trajectory. Below the processes that call them."""
