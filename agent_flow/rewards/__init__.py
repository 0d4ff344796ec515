"""Rewards of a reply's text, for flows."""

from clawstream.agent_flow.rewards.numbers import last_number

__all__ = ["last_number"]
