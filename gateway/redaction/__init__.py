"""Takes secrets and personal data out of what is kept. Engine and client see the original; records, spool and blobs do not.

`rules`: what a secret looks like. `scan`: finds them, and what stands in their place. `body`: JSON. `vocabulary`, `token_edits`: token ids.
`records`: whole records. `shell`: off the event loop, and what happens when it fails.
"""
