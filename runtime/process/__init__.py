"""How a process is configured, started, supervised and stopped."""
