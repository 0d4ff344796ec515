"""Marks of people on trajectories and steps: each is an event with its author and time."""
