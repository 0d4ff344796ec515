"""The composition root: command line, queries, operations. May import every process."""
