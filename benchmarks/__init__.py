"""Benchmarks: each prints one JSON line and measures all its sides in one run. None is a test."""
