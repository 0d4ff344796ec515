"""One pure adapter for each wire protocol."""
