"""Environments as flows: a user's own, and those of libraries where they are installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.agent_flow import FlowError, Split, flow
from clawstream.agent_flow.environments.environment import SEEDS_OF_A_CHANNEL, load_environment
from clawstream.agent_flow.flow import Flow
from clawstream.agent_flow.gateway.client import Gateway
from clawstream.agent_flow.main import run_flow
from clawstream.agent_flow.options import MOST_SEEDS, Mode, options_of, parse_words, split_of
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.play.runner import Runner
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Reward, SessionEvent, Step

CODEC = Codec()
OWN = """
from clawstream.agent_flow import flow

def environment(name, split):
    @flow(group_size=2)
    async def count(task, rollout):
        reply = await rollout.chat("count to " + name)
        return split.config["right"] if reply.text == name else 0.0

    @count.tasks
    def tasks():
        for seed in split.seeds:
            yield {"id": seed}

    return count
"""


def says(text: str) -> Script:
    return Script([ScriptedChoice([7], [text], [-0.5])])


def play(
    tmp_path: Path,
    words: list[str],
    script: Callable[[Any], Script],
    mode: Mode = Mode(),  # noqa: B008 - frozen
) -> tuple[Progress, list[Any]]:
    """Play an environment by its words; return the progress and the records on the log."""
    given, progress = parse_words([*words, "attempts=1"], {}), Progress()
    played = load_environment(str(given.env), split_of(given, mode))
    records: list[Any] = []

    async def scenario(fixture: GatewayFixture) -> None:
        # Groups on channel train wait for a trainer.
        options = options_of(given, played.limits, Mode(evaluate=True))
        async with Gateway(fixture.url, None, patience_s=5) as gateway:
            await Runner(played, gateway, options, progress).play(played.source)
        records.extend(fixture.records())

    run_gateway(tmp_path, CODEC, scenario, script)
    return progress, records


def rewards(records: list[Any]) -> list[float]:
    return [r.value for r in records if isinstance(r, Reward)]


def test_a_function_of_a_users_file_is_an_environment(tmp_path: Path) -> None:
    file = tmp_path / "own_environment.py"
    file.write_text(OWN)
    words = [f"env={file}:three", 'env_config={"right": 0.5}', "size=2", "seed=5", "n=2"]
    progress, records = play(tmp_path / "gateway", words, lambda _: says("three"))
    assert progress.summary()["rollouts"] == {"completed": 4}, progress.reasons
    assert rewards(records) == [0.5] * 4
    opened = [r for r in records if isinstance(r, SessionEvent) and r.kind == "opened"]
    assert {json.loads(r.metadata_json or b"")["id"] for r in opened} == {5, 6}


@given(size=st.integers(1, MOST_SEEDS), seed=st.integers(0, MOST_SEEDS))
def test_channels_share_no_seed(size: int, seed: int) -> None:
    train, val = Split("train", size, seed).seeds, Split("val", size, seed).seeds
    assert len(train) == len(val) == size
    assert train.stop <= SEEDS_OF_A_CHANNEL <= val.start and val.stop <= 2**31


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("textarena", "must be env=textarena:NAME"),
        ("no_such_module:x", "no_such_module"),
        ("json:x", "json has no function environment"),
    ],
)
def test_wrong_environment_is_named(spec: str, error: str) -> None:
    with pytest.raises(FlowError, match=error):
        load_environment(spec, Split())


def test_environment_function_must_return_a_flow(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def environment(name, split):\n    return 1\n")
    with pytest.raises(FlowError, match="returned a int, not a flow"):
        load_environment(f"{tmp_path / 'wrong.py'}:x", Split())


@pytest.mark.parametrize(("spec", "words"), [(None, []), ("flow.py:calc", ["env=textarena:x"])])
def test_either_a_flow_or_an_environment_is_played(spec: str | None, words: list[str]) -> None:
    with pytest.raises(FlowError, match="either"):
        run_flow(spec, words, Mode(), {})


@pytest.mark.parametrize("word", ["env_config=3", "env_config={", "size=0", "seed=-1"])
def test_wrong_word_is_named(word: str) -> None:
    with pytest.raises(FlowError, match=word.partition("=")[0]):
        parse_words([word], {})


def test_lifespan_surrounds_all_rollouts(tmp_path: Path) -> None:
    events: list[str] = []

    @flow(group_size=2)
    async def greet(task: Any, rollout: Any) -> float:
        events.append("played")
        return 1.0

    @greet.tasks
    def tasks() -> Any:
        events.append("asked for tasks")
        yield {}

    @greet.lifespan
    @asynccontextmanager
    async def shared() -> Any:
        events.append("began")
        yield
        await asyncio.sleep(0)
        events.append("ended")

    async def scenario(fixture: GatewayFixture) -> None:
        async with Gateway(fixture.url, None) as gateway:
            options = options_of(parse_words(["n=2"], {}), greet.limits, Mode(evaluate=True))
            await Runner(greet, gateway, options, Progress()).play(greet.source)

    run_gateway(tmp_path, CODEC, scenario, says("hello"))
    assert events == ["began", "asked for tasks", "played", "played", "ended"]


# -- reasoning-gym and textarena, by `make test-environments`


def test_reasoning_gym_scores_the_answer_in_its_tags(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    words = ["env=reasoning_gym:chain_sum", "size=2", "n=1", 'env_config={"max_terms": 2}']
    flow: Flow = load_environment(words[0][4:], Split("train", 2, config={"max_terms": 2}))
    answers = {task["question"]: task["answer"] for task in flow.source()}
    first = next(iter(answers))

    def solve(request: Any) -> Script:
        assert "<answer>" in request["messages"][0]["content"]
        question = request["messages"][1]["content"]
        return says(f"I think <answer>{answers[question]}</answer>" if question == first else "?")

    progress, records = play(tmp_path, words, solve)
    assert progress.summary()["rollouts"] == {"completed": 2}, progress.reasons
    assert sorted(rewards(records)) == [0.0, 1.0]


def test_reasoning_gym_evaluates_no_answer_in_the_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spiral_matrix evaluates the answer."""
    pytest.importorskip("reasoning_gym")
    from clawstream.agent_flow.environments.reasoning_gym_pool import ScorerPool

    monkeypatch.setenv("CLAWSTREAM_API_KEY", "claw-secret")
    file = tmp_path / "written"
    system = "__import__('os')"
    answers = [
        f"[open('{file}', 'w').write({system}.environ['CLAWSTREAM_API_KEY'])]",
        f"[{system}._exit(1)]",
        f"[{system}.kill({system}.getppid(), 9)]",
        "[9**9**9]",
    ]

    async def scenario() -> None:
        split = Split("train", 1)
        task = next(iter(load_environment("reasoning_gym:spiral_matrix", split).source()))
        entry = {"question": task["question"], "answer": task["answer"], "metadata": {}}
        entry["metadata"] = {"solution": json.loads(f"[{task['answer'].replace(' ', ',')}]")}
        scorer = ScorerPool("spiral_matrix", {"seed": split.seed, "size": 1}, size=1)
        async with scorer.running():
            for answer in answers:
                try:
                    assert await scorer.score(answer, entry) < 0.1
                except FlowError as error:
                    assert "ended" in str(error) and "kill" in answer
            assert await scorer.score(task["answer"], entry) == 1.0

    asyncio.run(scenario())
    assert not file.exists() or not file.read_text()


@pytest.mark.parametrize(
    ("name", "error"),
    [("chain_sums", "not registered"), ("chain_sum", "max_terms must be")],
)
def test_reasoning_gym_refuses_at_the_start(name: str, error: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(FlowError, match=error):
        load_environment(f"reasoning_gym:{name}", Split(config={"max_terms": -1}))


def test_textarena_is_played_until_the_game_ends(tmp_path: Path) -> None:
    pytest.importorskip("textarena")

    def bisect(request: Any) -> Script:
        """Guess the middle of what the answers so far leave; begin with an invalid move."""
        low, high, said = 1, 20, [m["content"] for m in request["messages"]]
        if len(said) == 1:
            return says("let me think")
        for guess, hint in zip(said[1::2], said[2::2], strict=True):
            if "higher" in hint:
                low = int(guess[1:-1]) + 1
            elif "lower" in hint:
                high = int(guess[1:-1]) - 1
        return says(f"[{(low + high) // 2}]")

    words = ["env=textarena:GuessTheNumber-v0", "size=3", "n=2"]
    progress, records = play(tmp_path, words, bisect)
    assert progress.summary()["rollouts"] == {"completed": 6}, progress.reasons
    assert rewards(records) == [1.0] * 6
    steps = [r for r in records if isinstance(r, Step)]
    by_seed: dict[str, set[int]] = {}
    for key in {s.trajectory_key for s in steps}:
        turns = sum(s.trajectory_key == key for s in steps)
        by_seed.setdefault(key.rpartition("-")[0], set()).add(turns)
    assert all(len(turns) == 1 for turns in by_seed.values()), "the games of a group are the same"


def test_textarena_games_depend_on_nothing_but_their_seed_and_moves() -> None:
    pytest.importorskip("textarena")
    from clawstream.agent_flow.environments.textarena import Game

    def draws(others: int) -> list[str]:
        games = [
            Game("Blackjack-v0", {}, 3),
            *(Game("Blackjack-v0", {}, 4 + i) for i in range(others)),
        ]
        seen = []
        for _ in range(4):
            for game in games:
                if game.reward is None:
                    game.move("[Hit]")
            seen.append(games[0].observation)
        return seen

    assert draws(0) == draws(3)


@pytest.mark.parametrize(
    ("name", "error"),
    [("TicTacToe-v0", "AssertionError"), ("PublicGoodsGame-v0", "not a game for one player")],
)
def test_textarena_refuses_games_of_several_players(name: str, error: str) -> None:
    pytest.importorskip("textarena")
    with pytest.raises(FlowError, match=error):
        load_environment(f"textarena:{name}", Split())
