"""The page on Claw-R1 names each of its configuration keys, and only settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from clawstream.schemas.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "claw-r1.md"
CLAW_R1_KEYS = (
    *("staleness_threshold", "trigger_parameter_sync_step", "use_rollout_log_probs"),
    *("max_queue_size", "require_batches", "partial_rollout", "checkpoint_engine", "n_rollouts"),
    *("scheduling_policy", "rollout.mode", "num_workers", "default_agent_flow"),
    *("agent_flow_config_path", "async_server.host", "async_server.port", "max_turns"),
    *("total_epochs", "total_rollout_steps", "test_freq", "model.path", "trust_remote_code"),
    *("save_freq", "save_path", "load_path", "rule_fn", "batch_size", "reward_loop_manager"),
    *("gateway_port", "gateway_startup_timeout", "nnodes", "n_gpus_per_node", "hybrid_engine"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
"""Keys of Claw-R1's configuration reference and of its configuration files."""


def rows() -> list[list[str]]:
    """Return the cells of the table of keys."""
    section = PAGE.read_text().partition("## Keys of the training configuration")[2]
    lines = section.partition("\n## ")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


@pytest.mark.parametrize("key", CLAW_R1_KEYS)
def test_each_key_has_a_row(key: str) -> None:
    assert any(re.search(rf"\b{re.escape(key)}\b", row[0]) for row in rows())


def test_each_setting_of_the_table_exists() -> None:
    sections = "|".join(Settings.model_fields)
    named = {
        name
        for row in rows()
        for name in re.findall(rf"`((?:{sections})(?:\.\w+)+)(?==|`)", " ".join(row[1:]))
    } - {"rollout.chat"}  # a method of flows
    assert len(named) > 15
    for name in named:
        model: object = Settings
        for part in name.split("."):
            assert isinstance(model, type) and issubclass(model, BaseModel), name
            assert part in model.model_fields, name
            model = model.model_fields[part].annotation
