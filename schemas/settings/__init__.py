"""All settings, in one frozen tree with one module per section.

Field names carry their units; descriptions say when to change a value.
`runtime.process.config.load` reads the settings once, at the start of a process: YAML file <
`CLAWSTREAM__A__B` environment variables < `a.b=c` arguments.
"""

from __future__ import annotations

from schemas.settings.admit import AdmitSettings, PolicySettings
from schemas.settings.demo import DemoSettings
from schemas.settings.gateway import GatewaySettings, RedactionSettings, UpstreamSettings
from schemas.settings.jobs import FunctionSettings, JobsSettings
from schemas.settings.kafka import BrokerSettings, KafkaSecurity, KafkaSettings
from schemas.settings.lake import LakeSettings
from schemas.settings.rollout import ENGINE_STOP_S, RolloutSettings
from schemas.settings.root import Settings
from schemas.settings.trainer import LoraSettings, TrainerSettings
from schemas.settings.up import MetricsSettings, UpSettings

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
