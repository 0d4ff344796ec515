"""The live tail."""
