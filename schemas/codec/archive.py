"""Archive every released schema as `avro/archive/NAME/FINGERPRINT.avsc`.

Run `python -m clawstream.schemas.codec.archive` whenever a schema has changed, before a process
writes a record with it. The archive starts at tag 0.1.0; from then on nothing is removed from it,
because a topic may still hold records of every archived schema.
"""

from __future__ import annotations

import sys

from clawstream.schemas.codec.foreign import fingerprint_of
from clawstream.schemas.codec.single_object import AVRO_DIR, TOP_LEVEL, shipped


def main() -> None:
    """Archive the current schemas that are not in the archive yet."""
    for cls in TOP_LEVEL:
        name = cls.__name__
        target = AVRO_DIR / "archive" / name / f"{fingerprint_of(shipped(name))}.avsc"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((AVRO_DIR / f"{name}.avsc").read_bytes())
            sys.stdout.write(f"archived {target.relative_to(AVRO_DIR)}\n")


if __name__ == "__main__":
    main()
