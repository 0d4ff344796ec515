"""Environments of verifiers 0.4, in a process and with packages of their own.

verifiers needs other versions of openai and mcp than Clawstream, and speaks HTTP only.
"""

from clawstream.agent_flow.environments.verifiers.client import environment

__all__ = ["environment"]
