"""`python -m agent_flow`."""

from agent_flow.main import main

main()
