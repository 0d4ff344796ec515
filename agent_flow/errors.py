"""Errors of agent flows. Each message says what happened, where, and what to do."""


class FlowError(Exception):
    """A flow, its tasks or its options are wrong, or the gateway refuses it."""


class RolloutFailed(FlowError):
    """One rollout cannot be played or gave no valid reward; other rollouts go on."""


class GatewayUnavailable(FlowError):
    """The gateway gave no usable answer in time."""
