"""The demo's settings: defaults for two cores and a tiny model, under the user's own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clawstream.schemas.settings import Settings

PROJECT = Path(__file__).resolve().parent.parent


def demo_settings(given: Settings) -> Settings:
    """Return all settings of a demo run.

    Raises:
        pydantic.ValidationError: the user's settings contradict the defaults.
    """
    demo, sync = given.demo, given.rollout.mode == "sync"
    home = (
        given.data_dir if "data_dir" in given.model_fields_set else Path("runs/demo")
    ).absolute()
    defaults: dict[str, Any] = {
        "run_id": "demo",
        "data_dir": home,
        "kafka": {"partitions": 4},
        "jobs": {
            "reward_functions": {"demo": ["clawstream.demo.rewards:price_answer@1"]},
            "trajectory_timeout_s": 120.0,
        },
        "admit": {
            "policy": {
                "group_size": 8,
                "required_rewards": ["rule/price_answer"],
                "reward_weights": {"rule/price_answer": 1.0},
                "reward_deadline_s": 60.0,
                "group_deadline_s": 180.0,
                # One more than rollouts may run ahead: groups become ready in another order than
                # they are started.
                "max_staleness": None if sync else demo.staleness + 1,
                # A group without spread has no gradient and costs nothing here; replacing it would
                # cost rollouts.
                "drop_zero_variance": False,
                "batch_groups": demo.groups_per_batch,
                "val_groups": demo.eval_tasks,
                "val_deadline_s": 10.0,
            }
        },
        "trainer": {
            "model_path": home / "model",
            "lr": 5e-4,
            "lr_decay": "linear",
            "lr_final": 1e-4,
            "max_versions": demo.versions,
            "seed": demo.seed,
            "keep_versions": 3,
        },
        "rollout": {
            "model_path": home / "boot",
            "dtype": demo.dtype,
            "max_model_len": 256,
            "kv_cache_mb": 64,
            "tool_parser": "strict_tags",
            "tool_parser_plugin": PROJECT / "demo" / "tool_parser.py",
        },
        "lake": {"flush_interval_s": 3.0},
        "demo": demo.model_dump() | ({"staleness": 0} if sync else {}),
    }
    return Settings.model_validate(_merge(defaults, given.model_dump(exclude_unset=True)))


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for name, value in top.items():
        below = out.get(name)
        out[name] = (
            _merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
        )
    return out
