"""Queries over the lake: SQL in a sandbox, lineage, curation by query."""
