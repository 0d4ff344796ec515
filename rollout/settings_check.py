"""Checks of a rollout worker's settings that need no engine."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from clawstream.rollout.main import create_server, public_url
from clawstream.rollout.server.process import is_cpu_build
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings


def _engine(settings: Settings) -> None:
    for rollout in settings.rollout.of_each_worker:
        worker = settings.model_copy(update={"rollout": rollout})
        public_url(worker, create_server(worker).base_url)


def _installed(settings: Settings) -> None:
    if not settings.rollout.attach_urls and find_spec("vllm") is None:
        raise SettingsError(
            "rollout: vLLM is not installed, see docs/install.md; or set rollout.attach_urls"
        )


def _gpus(settings: Settings) -> None:
    rollout = settings.rollout
    if rollout.workers > 1 and not (rollout.gpus or rollout.attach_urls or is_cpu_build()):
        raise SettingsError(
            f"rollout.gpus: name the GPUs of each of the {rollout.workers} workers, for example "
            "[0, 1]; otherwise all engines take the first GPU"
        )


def parser_names(file: str) -> frozenset[str]:
    """Return the names of vLLM's own parsers, read from its source: its import takes many seconds.

    Args:
        file: Below vLLM's package, of its parsers.

    Returns:
        Nothing when this vLLM lists them otherwise.
    """
    spec = find_spec("vllm")
    places = [] if spec is None else spec.submodule_search_locations or []
    for path in (Path(place) / file for place in places):
        if path.is_file():
            for node in ast.parse(path.read_bytes()).body:
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.targets[0], ast.Name)
                    and node.targets[0].id.endswith("_PARSERS_TO_REGISTER")
                ):
                    return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _parsers(settings: Settings) -> None:
    rollout = settings.rollout
    if rollout.attach_urls:
        return
    plugin = rollout.tool_parser_plugin
    if plugin is not None and not plugin.is_file():
        raise SettingsError(f"setting rollout.tool_parser_plugin: there is no file {plugin}")
    arguments = [*rollout.extra_args, *(["--tool-parser-plugin"] if plugin else [])]
    for setting, name, file in (
        ("tool_parser", rollout.tool_parser, "tool_parsers/__init__.py"),
        ("reasoning_parser", rollout.reasoning_parser, "reasoning/__init__.py"),
    ):
        registered = f"--{setting.replace('_', '-')}-plugin"
        if name is None or any(argument.startswith(registered) for argument in arguments):
            continue
        known = parser_names(file)
        if known and name not in known:
            raise SettingsError(
                f"setting rollout.{setting}={name!r}: vLLM has {', '.join(sorted(known))}"
            )


CHECKS = (_engine, _installed, _gpus, _parsers)
