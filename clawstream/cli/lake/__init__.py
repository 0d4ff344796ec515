"""Commands over the lake: tables, curation, lineage, export."""
