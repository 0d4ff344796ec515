"""Seeded learning runs: every algorithm on a task that a tiny model learns in seconds."""
