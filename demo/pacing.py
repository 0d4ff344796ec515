"""How far rollouts may run ahead of the trainer, as one formula."""

from __future__ import annotations


def may_launch(
    loaded_version: int,
    launched: int,
    refused: int,
    batch_groups: int,
    staleness: int,
    versions: int,
) -> int:
    """Groups that may be started now.

    With version v loaded, the batches v .. v + staleness may be in the making: (v + 1 + staleness)
    batches since the start, and never more than the run will train. Refused groups are replaced.
    """
    wanted = min(loaded_version + 1 + staleness, versions) * batch_groups
    return max(0, wanted - (launched - refused))
