"""Stream jobs: assemble trajectories, reward them, admit batches, write the lake tables."""
