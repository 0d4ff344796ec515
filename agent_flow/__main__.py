"""`python -m clawstream.agent_flow`."""

from clawstream.agent_flow.main import main

main()
