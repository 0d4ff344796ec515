"""Avro encoding and decoding of the records."""
