"""Run the embedded broker as a process of a supervisor, which restarts the process when it ends."""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from clawstream.runtime.broker.embedded import STOP_TIMEOUT_S, broker_of
from clawstream.runtime.broker.jvm import JvmDied, wait_gone
from clawstream.runtime.logs import logger
from clawstream.runtime.process.readiness import ready
from clawstream.schemas.settings import BrokerSettings

_POLL_S = 0.2


class _StopRequested(BaseException):
    """SIGTERM or SIGINT."""


def run_foreground(settings: BrokerSettings, data_dir: Path) -> int:
    """Run the broker as a supervised process: start it, stop it on SIGTERM or SIGINT.

    When the node dies, this process ends with the JVM's exit code and the supervisor restarts it.
    Replaces the handlers of SIGTERM and SIGINT. Raises the errors of `EmbeddedBroker.start`.

    Returns:
        The exit code: 0 after a signal, else that of the JVM.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise _StopRequested

    broker = broker_of(settings, data_dir)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        # The JVM of a supervised parent that was killed has been told to stop and needs a moment.
        wait_gone(broker.plan, STOP_TIMEOUT_S)
        # No deadline: a node that is stopped while it reads its logs starts over, and would never
        # get to their end.
        broker.start(patience_s=math.inf, report=lambda text: logger().info("starting", what=text))
        ready(broker.bootstrap_servers)
        while (code := broker.exit_code) is None:
            time.sleep(_POLL_S)
        return code
    except _StopRequested:
        return 0
    except JvmDied as died:
        if died.exit_code <= 128:
            raise
        sys.stderr.write(f"{died}\n")  # killed within its start is killed all the same
        return died.exit_code
    finally:
        broker.stop()
