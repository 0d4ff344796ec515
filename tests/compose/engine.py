"""Run a scripted engine on port 9000 of all interfaces, with token capture."""

from __future__ import annotations

import asyncio

from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice


async def main() -> None:
    """Serve until the container is stopped."""
    said = ScriptedChoice([7, 8], ["Hel", "lo"], [-0.1, -0.2])
    version = "default/0.0"  # the containers' run, so its tokens can be trained
    spans = ({"version": version, "start": 0, "end": 2},)
    engine = ScriptedEngine(lambda _: Script([said], versions=[spans], version_start=version))
    async with engine.serve(9000, "0.0.0.0"):
        await asyncio.Event().wait()


asyncio.run(main())
