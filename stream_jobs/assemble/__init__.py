"""Assemble: steps and rewards become trajectories and candidates."""
