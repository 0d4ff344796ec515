"""Builds step records from an engine's bytes. Pure."""
