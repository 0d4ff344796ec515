"""Convert records to table rows: which table takes which record, and its columns."""
