"""Map Claw-R1's own HTTP API and command line to ours. Only the application imports it."""
