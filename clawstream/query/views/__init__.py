"""The views and functions of SQL beyond the tables."""
