"""Admission: candidates become groups, batches and refusals under a run's policy."""
