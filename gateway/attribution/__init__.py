"""Attribute each request to a trajectory, a session and an agent."""
