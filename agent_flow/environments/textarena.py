"""Games of textarena for one player: a conversation until the game ends, with its reward."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena

from clawstream.agent_flow.environments.environment import Split
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task
from clawstream.agent_flow.threads import in_thread

_RANDOM = threading.Lock()
"""Held while a game draws from Python's global random generator."""


class Game:
    """A game that depends on its seed and the moves.

    textarena draws from the global random generator, so the generator's state is replaced by
    the game's own around every call, one call at a time. Other threads that draw from it meanwhile
    change the game, and a call that hangs stops all games.

    Attributes:
        observation: what the game has said since the last move.
        reward: None until the game has ended.
    """

    def __init__(self, name: str, config: Mapping[str, Any], seed: int) -> None:
        self._state = random.Random(seed).getstate()
        self.reward: float | None = None
        with self._own_random():
            # Without wrappers: the conversation has the earlier observations already.
            self._env = textarena.make(f"{name}-raw", **config)
            self._env.reset(num_players=1, seed=seed)
            if not isinstance(self._env.state, textarena.SinglePlayerState):
                raise FlowError("not a game for one player")
            self.observation = self._observe()

    def move(self, action: str) -> None:
        """Make a move; an invalid one is answered or punished by the game."""
        with self._own_random():
            done, _ = self._env.step(action=action)
            if done:
                rewards, _ = self._env.close()
                self.reward = float(rewards[0])
            else:
                self.observation = self._observe()

    def _observe(self) -> str:
        _, messages = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n\n".join(text for _, text, kind in messages if kind is not own)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _RANDOM:
            outer = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outer)


def environment(name: str, split: Split) -> Flow:
    """Return the flow of a game.

    Args:
        name: of the game, for example GuessTheNumber-v0.
        split: `config` has the game's own settings, for example `{"max_number": 50}`.

    Raises:
        FlowError: There is no such game, it is not for one player, needs data that are not on this
            machine, or a setting is wrong.
    """
    try:
        Game(name, split.config, split.seeds.start)
    except Exception as error:  # each game raises what it likes
        raise FlowError(f"env=textarena:{name}: {type(error).__name__}: {error}") from error

    async def play(task: Task, rollout: Rollout) -> float:
        game: Game = await in_thread(Game, name, split.config, task["seed"])
        messages: list[dict[str, Any]] = []
        while game.reward is None:
            messages.append({"role": "user", "content": game.observation})
            reply = await rollout.chat(messages)
            messages = reply.messages
            await in_thread(game.move, reply.text)
        return game.reward

    flow = Flow(play, Limits(), name)
    flow.tasks(lambda: ({"id": seed, "seed": seed} for seed in split.seeds))
    return flow
