"""Provide a scripted engine and a gateway in this process, for tests and demos."""
