"""Which trajectory, turn and retry a call belongs to. Pure."""
