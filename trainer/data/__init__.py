"""Ready batches and their trajectories as training sequences."""
