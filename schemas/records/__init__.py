"""The records, as frozen dataclasses in Avro's order of fields: the one definition of each record.

The string below a field, or below the alias that is its type, says its meaning, unit and length.
An absent value is None, which the strings call null. `clawstream.schemas.codec.record_schemas`
derives the files of `schemas/avro/`.
"""

from __future__ import annotations

from clawstream.schemas.records.assembly import AssemblyDelta, AssemblyMarker, AssemblySnapshot
from clawstream.schemas.records.batches import (
    BatchGroup,
    BatchMember,
    Late,
    PolicyApplied,
    ReadyBatch,
    Refused,
)
from clawstream.schemas.records.candidates import (
    AdmissionPolicy,
    Candidate,
    CandidateStep,
    RunEnded,
)
from clawstream.schemas.records.operations import DeadLetter, DeadLetterResolved, SchemaPublished
from clawstream.schemas.records.parts import (
    Blob,
    Channel,
    Outcome,
    Place,
    RewardSource,
    RewardValue,
    Tag,
    TokenSpan,
    VersionSpan,
)
from clawstream.schemas.records.rewards import Assessment, Curation, Finding, Reward
from clawstream.schemas.records.runs import BudgetRefusal, IndexedRun, RolloutBudget, RunIndex
from clawstream.schemas.records.steps import (
    Continuation,
    FailedCall,
    FailureSource,
    Sampling,
    SamplingSource,
    SessionEvent,
    SessionKind,
    Step,
    StepStatus,
    Tick,
    Usage,
)
from clawstream.schemas.records.trajectories import (
    Drift,
    Segment,
    StepMark,
    StepMarkKind,
    Trajectory,
    TrajectoryStep,
)
from clawstream.schemas.records.weights import (
    StepTraining,
    TrainedTokens,
    TrainedTrajectory,
    WeightFile,
    WeightFormat,
    WeightVersion,
    WorkerState,
    WorkerStatus,
)

__all__ = [
    "AdmissionPolicy",
    "AssemblyDelta",
    "AssemblyMarker",
    "AssemblySnapshot",
    "Assessment",
    "BatchGroup",
    "BatchMember",
    "Blob",
    "BudgetRefusal",
    "Candidate",
    "CandidateStep",
    "Channel",
    "Continuation",
    "Curation",
    "DeadLetter",
    "DeadLetterResolved",
    "Drift",
    "FailedCall",
    "FailureSource",
    "Finding",
    "IndexedRun",
    "Late",
    "Outcome",
    "Place",
    "PolicyApplied",
    "ReadyBatch",
    "Refused",
    "Reward",
    "RewardSource",
    "RewardValue",
    "RolloutBudget",
    "RunEnded",
    "RunIndex",
    "Sampling",
    "SamplingSource",
    "SchemaPublished",
    "Segment",
    "SessionEvent",
    "SessionKind",
    "Step",
    "StepMark",
    "StepMarkKind",
    "StepStatus",
    "StepTraining",
    "Tag",
    "Tick",
    "TokenSpan",
    "TrainedTokens",
    "TrainedTrajectory",
    "Trajectory",
    "TrajectoryStep",
    "Usage",
    "VersionSpan",
    "WeightFile",
    "WeightFormat",
    "WeightVersion",
    "WorkerState",
    "WorkerStatus",
]
