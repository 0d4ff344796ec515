"""The trainer beside plain computations of the same update."""
