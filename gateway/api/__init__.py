"""Define the REST routes that do not sample: sessions, trajectories, rewards, curations."""
