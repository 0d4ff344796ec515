"""The lake writer: every topic into append-only Delta tables, each record once."""
