"""Keeps every released schema: `python -m schemas.codec.archive` copies the current ones to `avro/archive/NAME/FINGERPRINT.avsc`.

Run it whenever a schema has changed, before its first record is written. Nothing is ever removed from the archive.
"""

from __future__ import annotations

import sys

from schemas.codec.single_object import AVRO_DIR, TOP_LEVEL, fingerprint_of, shipped


def main() -> None:
    """Archive what is not there yet."""
    for cls in TOP_LEVEL:
        name = cls.__name__
        target = AVRO_DIR / "archive" / name / f"{fingerprint_of(shipped(name))}.avsc"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((AVRO_DIR / f"{name}.avsc").read_bytes())
            sys.stdout.write(f"archived {target.relative_to(AVRO_DIR)}\n")


if __name__ == "__main__":
    main()
