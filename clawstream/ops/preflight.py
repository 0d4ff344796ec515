"""Checks of `clawstream up` before it starts a process, without Kafka or an engine.

A process that checks more than the types of its settings lists functions in `settings_check.CHECKS`
of its package; they raise SettingsError. The checks run in a child process, because they import
what the settings name, users' modules included. `up` itself checks the ports.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from clawstream.runtime.broker.embedded import broker_of, status
from clawstream.runtime.errors import InUse, PlumbingError
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import PREFIX
from clawstream.runtime.process.ports import PortTaken, check_free
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

Check = Callable[[Settings], object]

MODULES = {
    "gateway": "clawstream.gateway.settings_check",
    "reward": "clawstream.stream_jobs.reward.settings_check",
    "compare": "clawstream.stream_jobs.compare.settings_check",
    "admit": "clawstream.stream_jobs.reward.settings_check",
    "trainer": "clawstream.trainer.settings_check",
    "rollout": "clawstream.rollout.settings_check",
}
"""Process to the module of its checks."""
BROKER_GONE_S = 10.0
PORTS_FREE_S = 3.0
"""Processes of a supervisor that was just killed may keep their ports for a moment."""


class BrokerRuns(InUse):
    """A broker runs on this data directory already: stop its `broker run` or `clawstream up`."""


def check(settings: Settings, names: Sequence[str]) -> None:
    """Run all checks for the processes `names`. Raises SettingsError, BrokerRuns or PortTaken."""
    check_distinct(settings, names)
    _check_settings(settings, names)
    if "broker" in names:
        _check_no_broker(settings)
    check_ports(settings, names)


def check_ports(settings: Settings, names: Sequence[str]) -> None:
    """Raise PortTaken that names every port of the processes that another process has."""
    deadline = time.monotonic() + PORTS_FREE_S
    while taken := list(_taken_ports(settings, names)):
        if time.monotonic() > deadline:
            raise PortTaken("\n".join(map(str, taken)))
        time.sleep(0.1)


def _taken_ports(settings: Settings, names: Sequence[str]) -> Iterator[PortTaken]:
    for name, host, port, setting in ports(settings, names):
        try:
            check_free(host, port, name, setting)
        except PortTaken as error:
            yield error


def ports(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, str, int, str]]:
    """Yield process, host, port and the setting of the port, of everything that listens."""
    if "broker" in names:
        plan = broker_of(settings.broker, settings.broker_dir).plan
        for port in (plan.port, plan.controller_port):
            yield "broker", "127.0.0.1", port, "broker.port"
    if "gateway" in names:
        yield "gateway", settings.gateway.host, settings.gateway.port, "gateway.port"
    if "rollout" in names and not settings.rollout.attach_urls:
        for worker in settings.rollout.of_each_worker:
            yield "rollout", worker.host, worker.port, "rollout.port"
    for name in names:
        for index in range(settings.rollout.workers if name == "rollout" else 1):
            metrics = settings.metrics.after(index)
            if (own := metrics.port_of(name)) is not None:
                yield f"the metrics of {name}", metrics.host, own, "metrics.port"


def check_distinct(settings: Settings, names: Sequence[str]) -> None:
    """Raise SettingsError when two of the processes would listen on the same port."""
    known: dict[int, str] = {}
    for name, _, port, setting in ports(settings, names):
        if (other := known.get(port)) is not None:
            raise SettingsError(
                f"setting {setting}: {name} would listen on port {port}, and so would {other}; "
                "set another one"
            )
        known[port] = f"{name} ({setting})"


def _check_no_broker(settings: Settings) -> None:
    deadline = time.monotonic() + BROKER_GONE_S
    while (node := status(settings.broker_dir)) is not None and node.pid is not None:
        if time.monotonic() > deadline:
            raise BrokerRuns(
                f"broker: one runs on {settings.broker_dir} already (pid {node.pid}); stop the "
                "`clawstream broker run` or `clawstream up` that started it"
            )
        time.sleep(0.1)


def _check_settings(settings: Settings, names: Sequence[str]) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    done = subprocess.run(
        die_with_parent([sys.executable, "-P", "-m", "clawstream.ops.preflight", *names]),
        input=settings.model_dump_json(), capture_output=True, text=True, env=environ, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise PlumbingError(f"the settings could not be checked:\n{done.stderr[-2000:]}")
    problems = json.loads(done.stdout.splitlines()[-1])
    if problems:
        raise SettingsError("\n".join(problems))


def problems_of(settings: Settings, names: Sequence[str]) -> list[str]:
    """Return one text for each check of these processes that fails."""
    found: list[str] = []
    for module in dict.fromkeys(MODULES[name] for name in names if name in MODULES):
        try:
            checks: Sequence[Check] = importlib.import_module(module).CHECKS
        except ModuleNotFoundError as error:
            process = module.partition(".")[0]
            missing = f"the package {error.name}, which is not installed: see docs/install.md"
            found.append(f"{process} needs {missing}")
            continue
        for one in checks:
            try:
                one(settings)
            except SettingsError as error:
                found.append(str(error))
    return list(dict.fromkeys(found))


def main() -> None:
    """Check settings from standard input for the processes in argv; print problems as JSON."""
    problems = problems_of(Settings.model_validate_json(sys.stdin.read()), sys.argv[1:])
    sys.stdout.write(f"\n{json.dumps(problems)}\n")


if __name__ == "__main__":
    main()
