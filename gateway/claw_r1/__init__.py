"""Claw-R1's own HTTP API and command line, mapped to ours. Only the application imports it."""
