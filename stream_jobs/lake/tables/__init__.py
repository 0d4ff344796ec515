"""Records as rows: which table takes which record, and its columns."""
