"""Play a flow: groups within the rollout budget, rollouts side by side, failures replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from clawstream.agent_flow.errors import FlowError, GatewayUnavailable
from clawstream.agent_flow.flow import Flow, Limits, TaskSource
from clawstream.agent_flow.gateway.budget import GroupBudget
from clawstream.agent_flow.gateway.client import Channel, Gateway, Place
from clawstream.agent_flow.outcome import Ended, Outcome, Reward, checked_reward, total
from clawstream.agent_flow.play.played import STOPPED, Played
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task, id_text, metadata_of, numbered
from clawstream.agent_flow.threads import iterate_in_thread
from clawstream.agent_flow.user_code import users_code

BUDGET_EVERY_S = 1.0
SDK_RETRIES = 8
"""0.5 s doubling up to 8 s: 40 s, longer than a restart of any process takes."""
STOP_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to play a flow.

    Attributes:
        run: name of the run.
        channel: val is never trained, and has no budget.
        dry: play without effect: one rollout a task, on channel val, abandoned without a reward.
        shard: this process's index and the number of processes that share the tasks.
        limit: number of tasks; None: all.
        epochs: passes over the tasks.
        shuffle: seed of the order of the tasks, another one in each epoch; None: as they come.
        skip: tasks at the start of the first epoch that are not played.
        state: directory that remembers which groups were played; None: it is not remembered.
        sampling: fields that `Rollout.chat` sends.
    """

    limits: Limits
    run: str
    channel: Channel = "train"
    dry: bool = False
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    epochs: int = 1
    shuffle: int | None = None
    skip: int = 0
    state: Path | None = None
    model: str = "policy"
    sampling: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Plays groups of rollouts of one flow against one gateway.

    Attributes:
        last: the rollout that was opened last.
    """

    def __init__(self, flow: Flow, gateway: Gateway, options: Options, progress: Progress) -> None:
        self._flow, self._gateway, self._options = flow, gateway, options
        self._progress = progress
        self._free = asyncio.Semaphore(options.limits.concurrency)
        limits = options.limits
        self._budget = GroupBudget(options.shard[1], limits.timeout_s * limits.attempts)
        self._name = id_text(flow.name, 40)
        # Without a memory each call of the command has keys of its own: a key names one trajectory
        # for ever.
        self._played = Played(_directory(options, self._name), options.shard)
        self.last: Rollout | None = None
        # One pool of connections for all rollouts, because a client costs more than a rollout.
        self._openai = AsyncOpenAI(
            base_url=f"{gateway.url}/v1",
            api_key="none",
            max_retries=SDK_RETRIES,
            timeout=options.limits.timeout_s,
        )

    async def play(self, source: TaskSource) -> None:
        """Play all tasks; return when their rollouts have ended.

        On cancellation, rollouts in progress end as abandoned first.

        Tasks whose group was played by an earlier process are left out.

        Args:
            source: Yields the tasks; called once for each epoch.

        Raises:
            FlowError: A task is invalid, or the gateway cannot record.
        """
        polling = asyncio.create_task(self._poll()) if self._has_budget else None
        try:
            async with self._openai, self._lifespan(), asyncio.TaskGroup() as groups:
                await self._resume()
                for epoch in range(self._options.epochs):
                    async for task_id, task in self._tasks(source, epoch):
                        place = f"{epoch}/{task_id}"
                        if self._played.is_done(place):
                            continue
                        if not await self._may_start(polling):
                            return
                        name = f"{self._name}-{task_id}-{self._played.flow_id}"
                        group = self._played.begin(place, f"{name}.{epoch}" if epoch else name)
                        self._budget.group_started()
                        groups.create_task(self._group(place, group, task))
                        self._progress.groups += 1
        finally:
            self._played.close()
            if polling is not None:
                polling.cancel()

    async def _resume(self) -> None:
        """End the rollouts of an earlier process that died, so that nobody waits for them."""
        if self._played.directory is not None and (done := self._played.done):
            self._progress.resumed(done, self._played.directory)
        for one in self._played.in_doubt:
            outcome, reward, reason = one.end or ("abandoned", None, STOPPED)
            await self._complete(one.place, Ended(outcome, total(reward), reason), reward)

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            with users_code(f"the lifespan of flow {self._flow.name}"):
                await stack.enter_async_context(self._flow.while_played())
            yield

    async def _tasks(self, source: TaskSource, epoch: int) -> AsyncIterator[tuple[str, Task]]:
        options = self._options
        shuffle = None if options.shuffle is None else f"{options.shuffle}/{epoch}"
        skip = 0 if epoch else options.skip
        with users_code(f"the tasks of flow {self._flow.name}"):
            async for numbered_task in iterate_in_thread(
                lambda: numbered(source(), options.shard, options.limit, shuffle, skip)
            ):
                yield numbered_task

    @property
    def _has_budget(self) -> bool:
        return self._options.channel == "train"

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            try:
                answer = await self._gateway.budget(self._options.run, self._options.channel)
            except GatewayUnavailable:
                if loop.time() - answered > self._gateway.patience_s:
                    raise
            else:
                answered = loop.time()
                if answer is not None:
                    self._budget.update(answer, answered)
            await asyncio.sleep(BUDGET_EVERY_S)

    async def _may_start(self, polling: asyncio.Task[None] | None) -> bool:
        """Wait until a group may start. Returns False when the run has ended."""
        # A place for the group's first rollout: as many groups begin as can be played.
        async with self._free:
            pass
        if polling is None:
            return True
        while not self._budget.free:
            if self._budget.ended:
                return False
            if polling.done():
                polling.result()
            await asyncio.sleep(BUDGET_EVERY_S / 4)
        return True

    async def _group(self, task_place: str, group: str, task: Task) -> None:
        size = 1 if self._options.dry else self._options.limits.group_size
        metadata = metadata_of(task)
        async with asyncio.TaskGroup() as members:
            for member in range(size):
                place = Place(
                    f"{group}-{member}", group, size, self._options.channel, self._options.run
                )
                members.create_task(self._member(place, task, metadata))
        self._played.end(task_place)
        self._budget.group_ended()

    async def _member(self, place: Place, task: Task, metadata: dict[str, Any]) -> None:
        """Play one member of a group; a failed attempt is replaced by another trajectory."""
        attempts = self._options.limits.attempts
        for attempt in range(1, attempts + 1):
            key = place.key if attempt == 1 else f"{place.key}.{attempt}"
            async with self._free:
                ended = await self._attempt(
                    replace(place, key=key), task, metadata, last=attempt == attempts
                )
            self._progress.ended(ended)
            if ended.outcome != "replaced":
                return

    async def _attempt(
        self, place: Place, task: Task, metadata: dict[str, Any], last: bool
    ) -> Ended:
        """Open, play and end one trajectory."""
        # A task, because a trajectory that is being opened on cancellation must be ended, too.
        opening = asyncio.create_task(self._open(place, metadata))
        decided = list[tuple[Ended, Reward]]()
        try:
            rollout = self.last = await asyncio.shield(opening)
            reward, ended = await self._play(task, rollout, last)
            if self._options.dry:
                await self._end(rollout, Ended("abandoned", reason="dry run"), None)
                return ended
            decided.append((ended, reward))
            ended = await self._end(rollout, ended, reward)
        except asyncio.CancelledError:
            # The first end of a trajectory counts: one that is recorded already stays.
            for end in (*decided, (Ended("abandoned", reason=STOPPED), None)):
                with suppress(FlowError, TimeoutError):
                    async with asyncio.timeout(STOP_WITHIN_S / 2):
                        await self._end(await opening, *end)
                        break
            raise
        return ended

    async def _play(self, task: Task, rollout: Rollout, last: bool) -> tuple[Reward, Ended]:
        limit_s = self._options.limits.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                reward = checked_reward(await self._flow(task, rollout))
            await _check_rewards_of_agents(rollout)
            return reward, Ended("completed", total(reward))
        except GatewayUnavailable:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # Of the user's flow: the others go on.
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current and current.cancelling():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                outcome: Outcome = "abandoned" if last else "replaced"
                return None, Ended(outcome, None, f"no result within {limit_s:g} s")
            reason = f"{type(error).__name__}: {error}"[:500]
            return None, Ended("failed" if last else "replaced", None, reason)

    async def _open(self, place: Place, metadata: dict[str, Any]) -> Rollout:
        self._played.opened(place)
        session = await self._gateway.open(place, metadata)

        async def open_agent(name: str) -> Rollout:
            other = replace(place, key=f"{place.key}.{name}", group=f"{place.group}.{name}")
            return await self._open(other, metadata)

        return Rollout(
            place=place,
            session=session,
            model=self._options.model,
            sampling=self._options.sampling,
            openai=self._openai.with_options(base_url=session.base_url, api_key=session.api_key),
            open_agent=open_agent,
            give_reward=self._gateway.reward,
        )

    async def _end(self, rollout: Rollout, ended: Ended, reward: Reward) -> Ended:
        """End the trajectories of a rollout and of its other agents; return how it ended.

        A trajectory whose reward is refused ends as failed; those of the other agents do not.
        """
        await rollout.close()
        for agent in await rollout.opened_agents():
            own = agent.reward if ended.outcome == "completed" else None
            agents_end = await self._end(agent, ended, own)
            if agents_end is not ended and agents_end.reason is not None:
                self._progress.reasons[agents_end.reason] += 1
        return await self._complete(rollout.place, ended, reward)

    async def _complete(self, place: Place, ended: Ended, reward: Reward) -> Ended:
        self._played.ending(place, ended.outcome, reward, ended.reason)
        try:
            await self._gateway.complete(place, ended.outcome, reward, ended.reason)
        except GatewayUnavailable:
            raise
        except FlowError as error:  # the reward is out of bounds, or the key may not give one
            if reward is None:
                raise
            return await self._complete(place, Ended("failed", None, str(error)), None)
        self._played.ended(place)
        return ended


def _directory(options: Options, flow: str) -> Path | None:
    """Return the directory that remembers the groups of a flow, one for each run."""
    return None if options.state is None else options.state / id_text(options.run) / flow


async def _check_rewards_of_agents(rollout: Rollout) -> None:
    """Raise RolloutFailed if a reward that the flow has set is no reward."""
    for agent in await rollout.opened_agents():
        agent.reward = checked_reward(agent.reward)
        await _check_rewards_of_agents(agent)
