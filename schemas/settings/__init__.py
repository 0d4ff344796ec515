"""All settings, in one frozen tree with one module per section.

Field names carry their units; descriptions say when to change a value.
`clawstream.runtime.process.config.load` reads the settings once, at the start of a process: YAML
file < `CLAWSTREAM__A__B` environment variables < `a.b=c` arguments.
"""

from __future__ import annotations

from clawstream.schemas.settings.admit import AdmitSettings, PolicySettings
from clawstream.schemas.settings.demo import DemoSettings
from clawstream.schemas.settings.gateway import GatewaySettings, RedactionSettings, UpstreamSettings
from clawstream.schemas.settings.jobs import FunctionSettings, JobsSettings
from clawstream.schemas.settings.kafka import BrokerSettings, KafkaSecurity, KafkaSettings
from clawstream.schemas.settings.lake import LakeSettings
from clawstream.schemas.settings.rollout import ENGINE_STOP_S, RolloutSettings
from clawstream.schemas.settings.root import Settings
from clawstream.schemas.settings.trainer import LoraSettings, TrainerSettings
from clawstream.schemas.settings.up import MetricsSettings, UpSettings

__all__ = [
    "ENGINE_STOP_S",
    "AdmitSettings",
    "BrokerSettings",
    "DemoSettings",
    "FunctionSettings",
    "GatewaySettings",
    "JobsSettings",
    "KafkaSecurity",
    "KafkaSettings",
    "LakeSettings",
    "LoraSettings",
    "MetricsSettings",
    "PolicySettings",
    "RedactionSettings",
    "RolloutSettings",
    "Settings",
    "TrainerSettings",
    "UpSettings",
    "UpstreamSettings",
]
