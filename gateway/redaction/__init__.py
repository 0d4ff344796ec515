"""Removes secrets and personal data from records, spool and blobs.

Engine and client see the original data.

- `rules`: patterns of secrets.
- `scan`: finds and replaces secrets in text.
- `body`: redacts JSON.
- `vocabulary`, `token_edits`: redact token ids.
- `records`: redacts complete records.
- `redactor`: runs redaction off the event loop and handles its failures.
"""
