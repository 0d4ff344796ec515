"""From an engine's bytes to step records. Pure."""
