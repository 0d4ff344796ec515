"""Users' functions in child processes with a time-out."""
