"""Convert ready batches and their trajectories to training sequences."""
