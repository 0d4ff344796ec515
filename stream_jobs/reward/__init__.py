"""The reward job: reward functions and quality rules of closed trajectories."""
