"""Read the section `reward` of Claw-R1's configuration as settings of the reward job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECTION = "reward"


def without_claw_r1(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with Claw-R1's section as a reward function of every run.

    Args:
        tree: All settings before validation. Beside Claw-R1's keys the section may have the
            settings of a reward model of its type, such as `url`.

    Raises:
        ValueError: The section is no mapping, lacks a key, or has one that its type does not use.
    """
    if not isinstance(tree[SECTION], Mapping):
        raise ValueError(
            f"reward={tree[SECTION]!r:.80}: the section has keys, such as type; see docs/claw-r1.md"
        )
    given = dict(tree[SECTION])
    kind = given.pop("type", "rule")
    if kind not in ("rule", "disrm", "genrm"):
        raise ValueError(f"reward.type={kind}: it is rule, disrm or genrm")
    jobs = dict(tree.get("jobs") or {})
    if kind == "rule" or "reward_loop_manager" in given:
        spec = _function_in(kind, given)
    else:
        spec = f"{kind}@1"
        jobs["reward_models"] = {kind: _model_in(kind, given), **(jobs.get("reward_models") or {})}
    named = {"*": (), **(jobs.get("reward_functions") or {})}
    jobs["reward_functions"] = {
        # Anything but a list is left to the validation.
        run: tuple(dict.fromkeys([*specs, spec])) if isinstance(specs, list | tuple) else specs
        for run, specs in named.items()
    }
    return {name: value for name, value in tree.items() if name != SECTION} | {"jobs": jobs}


def _function_in(kind: str, given: dict[str, Any]) -> str:
    """Return the function of a section: a name, or `a.b.function` as `a.b:function`."""
    key = "rule_fn" if kind == "rule" else "reward_loop_manager"
    name = str(given.pop(key, "last_number"))
    if given:
        raise ValueError(
            f"reward.type={kind} with reward.{key} does not use {', '.join(sorted(given))}: the "
            "function chooses its own"
        )
    module, _, function = name.rpartition(".")
    return f"{module}:{function}@1" if module and ":" not in name else f"{name}@1"


def _model_in(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the reward model of a section. A model's own score counts, as in Claw-R1."""
    if "model_path" not in given:
        raise ValueError(f"reward.type={kind} needs reward.model_path")
    raw = {"raw": True} if kind == "disrm" else {}
    return {"type": kind, "model": given.pop("model_path"), **raw, **given}
