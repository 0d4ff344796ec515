"""Stream jobs: assemble, reward and compare trajectories, admit batches, write the lake."""
