"""Read numbers: what a function returned, and what a text says. Needs only the standard library."""
