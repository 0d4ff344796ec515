"""Rollout without an engine: which version is wanted, what a manifest must hold, how a server is
started.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from clawstream.rollout.engine_supervisor import EngineSupervisor
from clawstream.rollout.errors import InvalidWeights
from clawstream.rollout.main import create_server
from clawstream.rollout.server.process import (
    AttachedServer,
    is_cpu_build,
    server_arguments,
    server_environment,
)
from clawstream.rollout.server.weight_files import ADAPTERS, adapter_files, remove_others
from clawstream.rollout.settings_check import CHECKS
from clawstream.rollout.status import Report
from clawstream.rollout.versions import DEFER_MAX_S, DEFER_S, KEPT_VERSIONS, Versions, WeightsFeed
from clawstream.rollout.vllm_plugin.engine import Served, head_is_shared, read_layout, stage
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.kafka import Cluster, Record, Unavailable
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import WeightFile, WeightVersion
from clawstream.schemas.settings import RolloutSettings, Settings
from clawstream.schemas.topics import Topics

CODEC = Codec()

# ---------------------------------------------------------------- versions


def version(run: str, index: int) -> WeightVersion:
    return WeightVersion(
        version_id=f"{run}/{index}.0",
        run_id=run,
        sync_index=index,
        attempt=0,
        format="full",
        files=(),
        channel="train",
        metrics={},
        created_at=0,
    )


@given(
    st.lists(st.tuples(st.sampled_from(["ours", "theirs"]), st.integers(0, 9))),
    st.sets(st.integers(0, 9)),
)
def test_the_newest_version_of_the_run_is_wanted(
    published: list[tuple[str, int]], refused: set[int]
) -> None:
    versions = Versions("ours")
    for run, index in published:
        versions.add(version(run, index))
        assert versions.wanted(None) is None, "before the log has been read to its end"
    versions.reached_end()
    for index in refused:
        versions.reject(f"ours/{index}.0")
    ours = [index for run, index in published if run == "ours"][-KEPT_VERSIONS:]
    good = [index for index in ours if index not in refused]
    wanted = versions.wanted(None)
    assert (wanted.sync_index if wanted else None) == (good[-1] if good else None)
    if wanted is not None:
        assert versions.wanted(wanted.version_id) is None
        assert versions.wanted("ours/77.0") == wanted
    versions.reset()
    versions.reached_end()
    assert versions.wanted(None) is None


def test_a_version_that_cannot_be_read_now_is_wanted_again_later() -> None:
    now = [0.0]
    versions = Versions("ours", lambda: now[0])
    for index in range(3):
        versions.add(version("ours", index))
    versions.reached_end()
    assert versions.next_retry_s() is None
    versions.defer("ours/2.0")
    assert versions.wanted("ours/1.0") is None, "what serves is the best there is"
    assert (versions.wanted(None), versions.next_retry_s()) == (version("ours", 1), DEFER_S)
    now[0] = DEFER_S
    assert (versions.wanted("ours/1.0"), versions.next_retry_s()) == (version("ours", 2), None)
    waits = []
    for _ in range(7):
        versions.defer("ours/2.0")
        waits.append(versions.next_retry_s())
    assert waits == [*(DEFER_S * 2**n for n in range(1, 6)), DEFER_MAX_S, DEFER_MAX_S]


def test_after_eight_unusable_versions_an_older_good_one_is_found() -> None:
    versions = Versions("ours")

    def read_log() -> None:
        for index in range(3 * KEPT_VERSIONS):
            versions.add(version("ours", index))
        versions.reached_end()

    read_log()
    reads = 1
    while (wanted := versions.wanted(None)) is None or wanted.sync_index != 2:
        if versions.exhausted:
            versions.restart()
            assert versions.wanted(None) is None
            read_log()
            reads += 1
        else:
            assert wanted is not None
            versions.reject(wanted.version_id)
    assert reads == 3
    for index in range(3):
        versions.reject(version("ours", index).version_id)
    assert not versions.exhausted, "the log has none left"


class Log:
    """A weights log that breaks off after its second version when it is read for the first time.

    looks: how often was looked at what was published. The log goes on when that was done.
    """

    def __init__(self) -> None:
        self.reads = self.looks = 0
        self.over = False
        self.at_end = False
        self.left: list[WeightVersion] = []

    def topic_id(self, _: str) -> str:
        return "id"

    def reader(self, *_: object) -> Log:
        self.reads += 1
        self.left = [version("ours", i) for i in range(3)]
        return self

    def poll(self) -> list[Record]:
        looks = self.looks
        while self.looks < looks + 3 and not self.over:
            time.sleep(0.001)
        self.at_end = not self.left
        if self.reads == 1 and len(self.left) == 1:
            raise Unavailable("gone")
        found, self.left = self.left[:1], self.left[1:]
        return [Record("weights", 0, 0, 0, None, CODEC.encode(v), {}) for v in found]

    def close(self) -> None:
        pass


def test_a_log_that_is_read_again_does_not_bring_old_versions_back() -> None:
    async def body() -> list[int | None]:
        versions, updated, log = Versions("ours"), asyncio.Event(), Log()
        versions.add(version("ours", 9))
        versions.reached_end()  # as when Kafka went away later
        feed = WeightsFeed(cast("Cluster", log), Topics(), versions, updated)
        failed = feed.start()
        wanted: list[int | None] = [9]
        async with asyncio.timeout(60):
            while wanted[-1] != 2:
                await asyncio.sleep(0.001)
                log.looks += 1
                now = versions.wanted(None)
                if log.reads > 1 and (now.sync_index if now else None) != wanted[-1]:
                    wanted.append(now.sync_index if now else None)
        feed.stop()
        log.over = True
        assert not failed.done()
        return wanted

    assert asyncio.run(body()) == [9, None, 2]


# ---------------------------------------------------------------- files


def test_files_that_the_loaded_version_does_not_need_are_removed(tmp_path: Path) -> None:
    for digest in ("one", "two"):
        (tmp_path / digest).mkdir()
    remove_others(["two"], (), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    remove_others((), (), tmp_path / "never made")


def test_versions_that_the_engine_refuses_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rejected version nothing stays; of a deferred one, what was downloaded."""
    monkeypatch.chdir(tmp_path)
    settings = Settings.model_validate({"rollout": {"attach_urls": ["http://127.0.0.1:9"]}})
    versions, report = Versions(settings.run_id), Report(settings, "http://127.0.0.1:9")
    file = WeightFile(url="memory://v/model.safetensors", sha256="downloaded", size_bytes=1)
    failed = replace(version(settings.run_id, 1), files=(file,))

    async def scenario() -> None:
        supervisor = EngineSupervisor(
            settings,
            AttachedServer("http://127.0.0.1:9"),
            cast("ClientSession", None),
            versions,
            asyncio.Event(),
            report,
        )
        cache = supervisor._files
        assert cache.is_relative_to(tmp_path), "an engine in another directory needs absolute paths"
        for digest in ("loaded", "downloaded", "rebuilt"):
            (cache / digest).mkdir(parents=True)
        (cache / ADAPTERS / "r@0.0").mkdir(parents=True)
        supervisor._digests = ("loaded",)
        await supervisor._failed(failed, WeightsUnreadable("gone"))
        assert {path.name for path in cache.iterdir()} == {ADAPTERS, "loaded", "downloaded"}
        await supervisor._failed(failed, InvalidWeights("other"))
        assert {path.name for path in cache.rglob("*")} == {ADAPTERS, "r@0.0", "loaded"}
        assert report.status.failed_loads == 2

    asyncio.run(scenario())


def test_a_version_that_another_worker_loaded_has_no_time_of_loading() -> None:
    """Else its span would be the last loading of this worker, under the wrong version."""
    report = Report(Settings(), "http://127.0.0.1:9")
    report.loaded("run/1.0", 5.0)
    at = report.status.loaded_at
    report.set_state("draining", "run/1.0")
    assert at is not None and report.status.loaded_at == at
    report.set_state("ready", "run/2.0")
    assert report.status.loaded_at is None
    report.loaded("run/3.0", 5.0)
    assert report.status.loaded_at is not None


def test_an_adapter_has_a_directory_of_its_own_while_the_engine_holds_it(tmp_path: Path) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "adapter_config.json").write_text("{}")
    verified = [published / "adapter_config.json"]
    for version in ("r/1.0", "r/2.0"):
        (copy,) = adapter_files(version, verified, tmp_path / "worker")
        assert copy.read_text() == "{}"
    remove_others((), ("r/2.0",), tmp_path / "worker")
    assert [path.name for path in (tmp_path / "worker" / ADAPTERS).iterdir()] == ["r@2.0"]
    shutil.rmtree(published)
    assert copy.exists()


def test_an_adapter_that_cannot_be_copied_now_is_tried_again_later(tmp_path: Path) -> None:
    (tmp_path / "worker").touch()  # no directory can be made in it
    with pytest.raises(WeightsUnreadable, match=r"r/1\.0"):
        adapter_files("r/1.0", (), tmp_path / "worker")


def written(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """A safetensors file, as `stage` takes it: its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    return [str(path)]


def test_weights_are_checked_against_the_model(tmp_path: Path) -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    written(tmp_path / "model.safetensors", one)
    layout = read_layout(tmp_path)
    assert layout == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
    # Split over files otherwise than the model it replaces.
    files = list[str]()
    for name, tensor in one.items():
        files += written(tmp_path / f"{name}.part", {name: tensor})
    staged = stage(files, Served(layout, torch.float32))
    assert all(torch.equal(staged[name], tensor) for name, tensor in one.items())
    with pytest.raises(InvalidWeights, match=r"missing: b \(1\)"):
        stage(files[:1], Served(layout, torch.float32))
    with pytest.raises(InvalidWeights, match=r"missing: a, b \(2\)"):
        stage([], Served(layout, torch.float32))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidWeights, match="local model directory"):
        read_layout(tmp_path / "empty")


def test_a_file_is_read_to_its_end_or_refused(tmp_path: Path) -> None:
    tensors = {"none": torch.zeros(0, 3), "one": torch.tensor(-0.0), "flags": torch.ones(3).bool()}
    files = written(tmp_path / "model.safetensors", tensors)
    served = Served(read_layout(tmp_path), torch.float32)
    staged = stage(files, served)
    assert all(torch.equal(staged[n], t) and staged[n].shape == t.shape for n, t in tensors.items())
    (path,) = map(Path, files)
    whole = path.read_bytes()
    for damaged, reason in (
        (whole[:-1], "it ends within"),
        (whole + b" ", "goes on behind the last tensor"),
        (whole.replace(b'"BOOL"', b'"WIDE"'), "WIDE"),
        (whole.replace(b'"BOOL"', b'"I64" '), "has 3 bytes"),
        (whole[:30], "deserializing"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(WeightsUnreadable, match=reason):
            stage(files, served)
    path.unlink()
    with pytest.raises(WeightsUnreadable, match="No such file"):
        stage(files, served)


BF16 = {"model.embed_tokens.weight": ("BF16", (4, 2)), "model.norm.weight": ("BF16", (2,))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_version_in_another_float_dtype_than_the_boot_model_is_taken(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = {
        "model.embed_tokens.weight": torch.ones(4, 2, dtype=dtype),
        "model.norm.weight": torch.ones(2),
    }
    staged = stage(written(tmp_path / "v.safetensors", weights), Served(BF16, torch.bfloat16))
    assert all(torch.equal(staged[name], tensor) for name, tensor in weights.items()), (
        "the engine casts as it loads"
    )


def test_a_value_that_the_served_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    weights = {
        "model.embed_tokens.weight": torch.full((4, 2), 1e5),
        "model.norm.weight": torch.ones(2),
    }
    files = written(tmp_path / "v.safetensors", weights)
    assert stage(files, Served(BF16, torch.bfloat16))
    with pytest.raises(
        InvalidWeights, match=r"not finite in torch\.float16 in \['model.embed_tokens.weight'\]"
    ):
        stage(files, Served(BF16, torch.float16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_a_cast_would_misread_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {
        "model.embed_tokens.weight": torch.ones(4, 2).to(dtype),
        "model.norm.weight": torch.ones(2),
    }
    with pytest.raises(InvalidWeights, match=r"other dtype or shape: model\.embed_tokens\.weight"):
        stage(written(tmp_path / "v.safetensors", weights), Served(BF16, torch.bfloat16))


def test_a_tied_output_head_may_be_there_or_not(tmp_path: Path) -> None:
    body = {
        "model.embed_tokens.weight": torch.arange(8.0).view(4, 2),
        "model.norm.weight": torch.ones(2),
    }
    head = {"lm_head.weight": body["model.embed_tokens.weight"].clone()}
    without, redundant = (
        written(tmp_path / "a.safetensors", body),
        written(tmp_path / "b.safetensors", body | head),
    )
    with_head = {**BF16, "lm_head.weight": ("BF16", (4, 2))}
    for layout in (BF16, with_head):
        for files in (without, redundant):
            staged = stage(files, Served(layout, torch.bfloat16, tied=True))
            assert set(staged) == set(body), "a tied head is not loaded a second time"
    with pytest.raises(InvalidWeights, match=r"unknown: lm_head\.weight \(1\)"):
        stage(redundant, Served(BF16, torch.bfloat16))
    with pytest.raises(InvalidWeights, match=r"missing: lm_head\.weight \(1\)"):
        stage(without, Served(with_head, torch.bfloat16))
    head["lm_head.weight"][0, 0] = 7.0
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight is not the embedding"):
        stage(
            written(tmp_path / "c.safetensors", body | head),
            Served(BF16, torch.bfloat16, tied=True),
        )


def test_a_head_that_is_the_embedding_again_is_shared() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "norm": torch.nn.LayerNorm(2)})
    model["lm_head"] = torch.nn.Linear(2, 4, bias=False)
    assert not head_is_shared(model)
    model["lm_head"].weight = model["embed"].weight
    assert head_is_shared(model)


def test_the_layout_of_a_sharded_model_is_that_of_the_files_in_its_index(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    written(tmp_path / first, {"a": torch.zeros(2, 3)})
    written(tmp_path / second, {"b": torch.zeros(4)})
    written(
        tmp_path / "consolidated.safetensors", {"the.same.under.another.name": torch.zeros(2, 3)}
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": first, "b": second}})
    )
    layout = read_layout(tmp_path)
    assert layout == {"a": ("F32", (2, 3)), "b": ("F32", (4,))}
    assert stage(
        written(tmp_path / "v" / "one.safetensors", {"a": torch.ones(2, 3), "b": torch.ones(4)}),
        Served(layout, torch.float32),
    )
    (tmp_path / second).unlink()
    with pytest.raises(InvalidWeights, match=second):
        read_layout(tmp_path)


# ---------------------------------------------------------------- server


def test_settings_become_arguments(tmp_path: Path) -> None:
    plugin = tmp_path / "parser.py"
    settings = RolloutSettings(
        port=4321,
        tool_parser="mine",
        tool_parser_plugin=plugin,
        reasoning_parser="r1",
        extra_args=("--seed", "3"),
    )
    arguments = server_arguments(settings, tmp_path)
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--model"] == str(tmp_path)
    assert pairs["--port"] == "4321"
    assert pairs["--tool-call-parser"] == "mine"
    assert pairs["--tool-parser-plugin"] == str(plugin)
    assert pairs["--reasoning-parser"] == "r1"
    assert "--enable-auto-tool-choice" in arguments
    assert arguments[-2:] == ["--seed", "3"], "last, so that it can overrule ours"
    assert "--tool-call-parser" not in server_arguments(RolloutSettings(), tmp_path)
    assert "--enable-lora" not in arguments
    adapters = dict(itertools.pairwise(server_arguments(RolloutSettings(), tmp_path, 12)))
    assert (adapters["--max-loras"], adapters["--max-lora-rank"]) == ("3", "16")


@pytest.mark.skipif(not is_cpu_build(), reason="an accelerator's worker has its own process")
def test_the_worker_of_a_cpu_build_is_in_the_process_of_the_engine(tmp_path: Path) -> None:
    backend = "--distributed-executor-backend"
    assert backend in server_arguments(RolloutSettings(), tmp_path)
    for several in (("--tensor-parallel-size", "2"), ("-tp=2",), ("-pp", "2")):
        assert backend not in server_arguments(RolloutSettings(extra_args=several), tmp_path)
    template = RolloutSettings(extra_args=("--chat-template=parallel.jinja", "-x", "parallel"))
    assert backend in server_arguments(template, tmp_path)
    assert int(server_environment({})["OMP_NUM_THREADS"]) >= 1
    assert server_environment({"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_the_environment_keeps_what_was_there() -> None:
    environment = server_environment(
        {"PYTHONPATH": "/a:/b", "HOME": "/h", "PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["HOME"] == "/h"
    assert environment["PYTHONPATH"].split(":")[1:] == ["/a", "/b"]
    assert "VLLM_SERVER_DEV_MODE" not in environment, (
        "its routes change weights without authentication"
    )
    gpus = server_environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("2,3",))
    assert gpus["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert server_environment({"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_worker_without_a_model_says_which_setting_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rollout\.model_path"):
        create_server(Settings())
    with pytest.raises(SettingsError, match="no Hugging Face model directory"):
        create_server(Settings.model_validate({"trainer": {"model_path": tmp_path}}))
    attached = Settings.model_validate({"rollout": {"attach_urls": ["http://10.0.0.1:8000/v1"]}})
    assert create_server(attached).base_url == "http://10.0.0.1:8000"


# ---------------------------------------------------------------- several workers


def test_each_of_several_workers_has_a_name_a_port_and_gpus_of_its_own() -> None:
    settings = RolloutSettings.model_validate({"workers": 2, "gpus": ["0,1", "2"], "port": 9000})
    each = settings.of_each_worker
    assert [(w.worker_id, w.port, w.gpus) for w in each] == [
        ("worker-0", 9000, ("0,1",)),
        ("worker-1", 9001, ("2",)),
    ]
    for worker in each:  # as a process reads them
        assert RolloutSettings.model_validate_json(worker.model_dump_json()) == worker
    alone = RolloutSettings.model_validate({"gpus": ["3"]})
    assert alone.of_each_worker == (alone,)


@pytest.mark.parametrize(
    ("rollout", "error"),
    [
        ({"workers": 2, "gpus": ["0"]}, "gpus has 1 entries, but rollout.workers=2"),
        ({"attach_urls": ["http://a", "http://b"]}, "attach_urls has 2 entries"),
        ({"gpus": ["0"], "attach_urls": ["http://a"]}, "have theirs already"),
        ({"workers": 2, "public_url": "http://gpu-1:8200"}, "set rollout.host"),
    ],
)
def test_settings_of_workers_that_contradict_each_other_are_refused(
    rollout: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        RolloutSettings.model_validate(rollout)


def test_one_process_is_one_worker_and_all_of_them_are_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = Settings.model_validate({"rollout": {"workers": 2, "model_path": tmp_path}})
    with pytest.raises(SettingsError, match=r"rollout\.workers=2: `clawstream up` starts several"):
        create_server(settings)
    for check in CHECKS:
        check(settings.model_copy(update={"rollout": settings.rollout.of_each_worker[1]}))
    urls = ["http://a:1/v1", "http://b:1"]
    attached = Settings.model_validate({"rollout": {"workers": 2, "attach_urls": urls}})
    for check in CHECKS:
        check(attached)
    servers = [
        create_server(attached.model_copy(update={"rollout": worker})).base_url
        for worker in attached.rollout.of_each_worker
    ]
    assert servers == ["http://a:1", "http://b:1"]
