"""REST routes without sampling: sessions, trajectories, rewards, curations."""
