"""All settings, in one frozen tree. A name carries its unit; the line beside it says why one would change it.

Read once, at the start of a process, by `runtime.process.config.load`: YAML < `CLAWSTREAM__A__B` in the environment < `a.b=c` words.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.ids import RUN_ID
from schemas.records import Channel, Outcome
from schemas.reward_matching import SMALLEST_GROUP
from schemas.rule_spec import is_own, name_in, of_run
from schemas.topics import Topics

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(coerce_numbers_to_str=True)]
"""A number is a name too: on a command line `worker_id=1` is one."""
ENGINE_STOP_S = 10.0
"""So long an engine may take to end before it is killed; a second more is for the worker's own end."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False  # a name: where it leads is not known here


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class KafkaSettings(_Section):
    """Which cluster, and how its topics are made."""

    bootstrap_servers: str | None = Field(
        None, description="another cluster than the embedded broker"
    )
    client_options: Mapping[str, str] = Field(
        {}, description="librdkafka options, e.g. security.protocol, sasl.*"
    )
    topic_prefix: str = Field(
        "claw", pattern=r"^[a-z0-9_-]{1,32}$", description="several installations on one cluster"
    )
    partitions: Count = Field(12, description="P of the keyed topics; fixed once they exist")
    replication_factor: Count | None = Field(
        None,
        description="copies of each topic; default 3 on embedded brokers of three or more nodes, else 1",
    )
    min_insync_replicas: Count | None = Field(
        None, description="copies an acknowledgement waits for; default one less than there are"
    )
    steps_retention_s: Positive = Field(
        30 * 86400.0, description="how long raw steps stay replayable from Kafka"
    )

    @property
    def topics(self) -> Topics:
        return Topics(self.topic_prefix)


class BrokerSettings(_Section):
    """The embedded Apache Kafka; unused when kafka.bootstrap_servers names another cluster."""

    data_dir: Path | None = Field(
        None, description="a faster or larger disk; default <data_dir>/broker"
    )
    port: Port = Field(19092, description="the port is taken")
    advertised_host: str = Field(
        "127.0.0.1",
        description="the name by which clients on other machines or in other containers reach it",
    )
    nodes: Literal[1, 3, 5] = Field(1, description="3: try replication on one machine")
    heap_mb: Annotated[int, Field(ge=200)] = Field(
        300, description="many partitions or large records"
    )
    java: str | None = Field(
        None, description="a Java >= 17 of your own instead of the packaged one"
    )
    jars_dir: Path | None = Field(
        None, description="shared cache of Kafka's jars; default ~/.cache/clawstream"
    )


class UpstreamSettings(_Section):
    """An engine or provider that does not report on the workers topic. A bare URL stands for one with all defaults."""

    url: str = Field(description="its base URL, with or without /v1")
    kind: Literal["auto", "captured", "vllm", "text"] = Field(
        "auto", description="do not probe what it can tell of tokens"
    )
    api_key: str | None = Field(None, repr=False, description="it wants a key")
    api_key_env: str | None = Field(
        None, description="the key is in this environment variable, so not in a file"
    )
    api_key_header: Literal["authorization", "x-api-key"] | None = Field(
        None,
        description="default: x-api-key on Anthropic's paths of a provider, else authorization: Bearer",
    )
    forward_credentials: bool = Field(
        False, description="agents bring their own keys of this provider"
    )
    models: tuple[str, ...] = Field((), description="it serves only these")
    model_map: Mapping[str, str] = Field(
        {}, description="it has another name for a model that agents ask for"
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> UpstreamSettings:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url is not http(s)://HOST[:PORT][/PATH]")
        if parts.port == 0 or parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                "url holds more than host and path; a key belongs into api_key or api_key_env"
            )
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("api_key and api_key_env are both set")
        return self


class RedactionSettings(_Section):
    """Secrets and personal data are taken out of what the gateway keeps; see docs/redaction.md."""

    enabled: bool = Field(False, description="agents handle real secrets or people's data")
    rules: tuple[str, ...] = Field(
        (
            *(
                "private_key",
                "url_login",
                "aws_secret",
                "aws_key",
                "api_key",
                "jwt",
                "bearer",
                "secret",
            ),
            *("email", "iban", "card", "ssn", "phone"),
        ),
        description="fewer or other kinds, e.g. ipv4, or `file.py:function`, `module:function` of your own",
    )
    style: Literal["hashed", "plain"] = Field(
        "hashed", description="plain: equal values cannot be told from different ones"
    )
    tokenizers: Mapping[str, Path] = Field(
        {},
        description="model name (or *) to its tokenizer.json; default gateway.tokenizer_path; without one no ids are kept",
    )


class GatewaySettings(_Section):
    """Where agents point their base_url."""

    gateway_id: Name = Field("gateway-0", description="several gateways: one name each")
    host: str = Field("127.0.0.1", description="0.0.0.0 to serve other machines")
    port: Port = Field(8100, description="the port is taken")
    public_url: str | None = Field(
        None, description="behind a load balancer: the URL that agents are given"
    )
    base_path: Annotated[str, Field(pattern=r"^(/[^/?#\s]+)*$")] = Field(
        "",
        description="a proxy before it keeps its own prefix in the path: that prefix, e.g. /api/openai",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="browsers call it: origins whose pages may, e.g. https://app.example, or * for all",
    )
    upstreams: tuple[UpstreamSettings, ...] = Field(
        (), description="engines that do not report on the workers topic"
    )
    acks: Literal["all", "none"] = Field(
        "all", description="none: reply before the step is on Kafka; a crash may lose it"
    )
    produce_timeout_s: Positive = Field(
        5.0, description="wait for Kafka's acknowledgement before the step is spooled"
    )
    spool_dir: Path | None = Field(
        None, description="persistent volume for the spool; default <data_dir>/spool"
    )
    spool_max_bytes: Count = Field(1 << 30, description="longer Kafka outages")
    spool_max_age_s: Positive | None = Field(
        None,
        description="older segments wait for `clawstream spool drain`; default half of jobs.closed_horizon_s",
    )
    blob_uri: str | None = Field(
        None,
        description="object store or shared disk for large fields, any fsspec URL; default <data_dir>/blobs",
    )
    blob_options: Mapping[str, str] = Field(
        {}, description="fsspec options of blob_uri, e.g. credentials"
    )
    max_body_bytes: Count = Field(32 << 20, description="very long prompts or many images")
    max_in_flight: Count = Field(4096, description="memory: calls beyond it get 503")
    max_in_flight_bytes: Count = Field(
        256 << 20,
        description="memory: bodies of calls beyond it get 503; a call takes about six times its body",
    )
    max_reply_bytes: Count = Field(
        64 << 20, description="larger replies that are not streamed; each is held in memory"
    )
    max_in_flight_reply_bytes: Count = Field(
        256 << 20,
        description="memory: replies of all calls; beyond it new calls get 503, and all replies but one wait",
    )
    client_timeout_s: Positive = Field(
        60.0,
        description="agents on slow links: how long one may take nothing, or need to send a request",
    )
    upstream_timeout_s: Positive = Field(
        600.0,
        description="engines that are silent for longer: plain replies of very long generations",
    )
    upstream_total_timeout_s: Positive | None = Field(
        None,
        description="bound a whole reply too, e.g. streams of agents that never stop; default: none",
    )
    worker_wait_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="wait for a ready engine before 503"
    )
    probe_interval_s: Positive = Field(2.0, description="how soon an engine that hangs is noticed")
    session_secret: str | None = Field(
        None, description="several gateways on several machines: the same for all"
    )
    auth: Literal["open", "required"] | None = Field(
        None,
        description="whether a key is needed; default: open on loopback, required on any other host",
    )
    api_keys_file: Path | None = Field(
        None, description="shared by several gateways; default <data_dir>/api-keys.json"
    )
    session_rewards: bool = Field(
        False,
        description="environments that hold nothing but a session key may give a reward when they complete",
    )
    reward_min: float = Field(
        -1e6, allow_inf_nan=False, description="smallest reward that is believed"
    )
    reward_max: float = Field(
        1e6, allow_inf_nan=False, description="largest reward that is believed"
    )
    max_prompt_tokens: Count | None = Field(
        None,
        description="refuse longer prompts sooner than the engine's own bound does; long ones cost a request for counting",
    )
    default_max_tokens: Count | None = Field(
        None, description="bound of replies whose client named none"
    )
    tokenizer_path: Path | None = Field(
        None,
        description="directory with tokenizer.json: text of submitted steps, and for compute_reward",
    )
    redaction: RedactionSettings = RedactionSettings()
    compute_reward: str | None = Field(
        None,
        description="what POST /compute_reward calls: `name@version`, `file.py:function@version` or `module:function@version`",
    )

    @property
    def auth_required(self) -> bool:
        """Whether every request needs a key. A host that others can reach is never open by oversight."""
        return self.auth == "required" if self.auth is not None else not _is_loopback(self.host)

    @model_validator(mode="after")
    def _consistent(self) -> GatewaySettings:
        if self.reward_min > self.reward_max:
            raise ValueError(
                f"reward_min {self.reward_min:g} is above reward_max {self.reward_max:g}"
            )
        return self


class FunctionSettings(_Section):
    """Reward functions and quality rules of your own; see docs/reward-functions.md."""

    dirs: tuple[Path, ...] = Field(
        (),
        description="where their files and modules are; default: the working directory, then the config file's folder",
    )
    timeout_s: Positive = Field(
        30.0, description="functions that ask a model; one that takes longer gives no reward"
    )
    processes: Count = Field(
        2, description="functions that wait or compute long: as many run at once"
    )

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder.absolute() for folder in self.dirs or (Path(),))


class JobsSettings(_Section):
    """The stream jobs `assemble` and `reward`."""

    worker_id: Name | None = Field(
        None,
        description="one fixed name each, under which a worker that is started again gets its partitions back at once; default: "
        "host and process id, so that no two are the same",
    )
    batch_records: Count = Field(500, description="latency against throughput")
    snapshot_min_bytes: Count = Field(
        4 << 20, description="shorter recovery against more state log"
    )
    session_timeout_s: Positive = Field(6.0, description="how soon a dead worker's partitions move")
    tick_interval_s: Positive = Field(1.0, description="resolution of time-outs")
    write_ticks: bool = Field(
        True, description="copied topics have the ticks of their source and must get no others"
    )
    trajectory_timeout_s: Positive = Field(
        3600.0, description="agents that think longer between two calls"
    )
    closed_horizon_s: Positive = Field(
        86400.0, description="how long after closing a reward still finds its trajectory"
    )
    closed_max: Count = Field(50_000, description="memory of closed trajectories a partition")
    orphan_after_s: Positive = Field(600.0, description="rewards that come long before their steps")
    cache_mb: Count = Field(1024, description="memory for payload of open trajectories")
    bucket_inactivity_s: Positive = Field(
        300.0,
        description="agents that name no trajectory and pause longer between two calls, or rewards sooner",
    )
    agent_inactivity_s: Positive = Field(
        1800.0,
        description="known agents whose people pause longer between two calls, or rewards sooner",
    )
    train_truncated: bool = Field(
        False,
        description="agents that can't do without top_p, top_k, min_p, penalties or a grammar: every ratio is off",
    )
    reward_functions: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="run id (or *) to `name@version`, `file.py:function@version` or `module:function@version`",
    )
    quality_functions: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="run id (or *) to quality rules, named in the same way, or to `built_in`; see docs/quality.md",
    )


class PolicySettings(_Section):
    """The admission policy of the run, published when it differs from the one in force."""

    group_size: Count = Field(8, description="members a group")
    min_members: Count = Field(2, description="usable members of a short group")
    required_rewards: tuple[str, ...] | None = Field(
        None,
        description="`source` or `source/name` each member needs; default: every reward function of the run that counts",
    )
    reward_weights: Mapping[str, float] = Field(
        {}, description="`source/name` to weight in the training reward"
    )
    reward_deadline_s: Positive = Field(600.0, description="slow reward models or people")
    group_deadline_s: Positive = Field(1800.0, description="stragglers of a group")
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None, description="versions; how far off-policy"
    )
    drop_zero_variance: bool = Field(True, description="keep groups whose rewards are all equal")
    min_trainable_tokens: Annotated[int, Field(ge=0)] = Field(
        1, description="drop near-empty replies"
    )
    max_trajectory_tokens: Count | None = Field(None, description="memory of the trainer")
    train_outcomes: tuple[Outcome, ...] = Field(
        ("completed", "failed"), description="train on time-outs too"
    )
    batch_groups: Count = Field(16, description="groups a batch")
    batch_tokens: Count | None = Field(
        None, description="close a batch early at this many trainable tokens"
    )
    sync_every: Count = Field(1, description="batches a weight version; fixed for the run")
    val_groups: Count = Field(64, description="groups a validation batch")
    val_deadline_s: Positive = Field(60.0, description="close a validation batch that stays short")
    algorithm: str = Field("grpo", description="what the trainer does")
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="drop low-quality trajectories"
    )
    min_step_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="leave out low-quality steps"
    )
    require_assessment: bool | None = Field(
        None,
        description="wait for the quality rules' answer as for a required reward; default: where they decide",
    )
    untrained_tags: tuple[str, ...] = Field(
        ("title", "summary"),
        description="train the calls an agent makes beside its work, or not its sub-agents",
    )

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        if self.min_members > self.group_size:
            raise ValueError(
                f"min_members {self.min_members} is above group_size {self.group_size}"
            )
        smallest = SMALLEST_GROUP.get(self.algorithm, 1)
        if self.group_size < smallest:
            raise ValueError(
                f"{self.algorithm} needs groups of at least {smallest}: a smaller one has no advantage"
            )
        return self


class AdmitSettings(_Section):
    """The admission process: one active for each run and channel."""

    channels: tuple[Channel, ...] = Field(
        ("train", "val"), description="one process for each channel instead"
    )
    policy: PolicySettings = PolicySettings()


class LakeSettings(_Section):
    """The Delta Lake writer."""

    uri: str | None = Field(
        None, description="another disk or an object store; default <data_dir>/lake"
    )
    storage_options: Mapping[str, str] = Field(
        {}, description="credentials and options of the object store"
    )
    flush_interval_s: Positive = Field(2.0, description="fresher tables against more small files")
    flush_rows: Count = Field(8000, description="memory against more commits")
    dedupe_window: Count = Field(
        200_000, description="ids a table remembers to drop re-sent records"
    )
    care_interval_s: Positive = Field(
        600.0,
        description="how often small files become large ones, beside the writer, and what is too old goes",
    )
    history_days: Positive = Field(
        2.0,
        description="how far back SQL can ask for a table as it was; files and log entries stay as long",
    )
    retention_days: Mapping[str, Annotated[float, Field(ge=1)]] = Field(
        {},
        description="table to the age at which its rows are deleted; one that is not named keeps them for ever",
    )
    sql_memory_mb: Annotated[int, Field(ge=64)] = Field(
        4096, description="SQL over more data at once; one query's limit"
    )
    sql_timeout_s: Positive = Field(300.0, description="SQL that takes longer; one query's limit")
    writers: Annotated[int, Field(ge=1, le=999)] = Field(
        1,
        description="more rows a second than one process writes; each takes the partitions p with p % writers == writer",
    )
    writer: Annotated[int, Field(ge=0)] = Field(
        0, description="several writers: each its own number, from 0"
    )

    @model_validator(mode="after")
    def _consistent(self) -> LakeSettings:
        if self.writer >= self.writers:
            raise ValueError(
                f"writer {self.writer} is not one of writers {self.writers}, which count from 0"
            )
        return self


class TrainerSettings(_Section):
    """The learner."""

    model_path: Path | None = Field(
        None, description="Hugging Face directory of the initial weights"
    )
    weights_dir: Path | None = Field(
        None, description="where versions are published; default <data_dir>/weights"
    )
    checkpoint_dir: Path | None = Field(None, description="default <data_dir>/checkpoints")
    keep_checkpoints: Count = Field(2, description="disk")
    keep_versions: Count = Field(5, description="disk; workers load only the newest")
    sync_every: Count = Field(1, description="must equal admit.policy.sync_every")
    max_versions: Annotated[int, Field(ge=0)] | None = Field(
        None, description="stop after this many versions"
    )
    first_attempt: Annotated[int, Field(ge=0)] = Field(
        0,
        description="lowest attempt of version ids; above all that recorded data names. A replay sets it",
    )
    lr: Positive = Field(1e-6, description="learning rate at the first version")
    lr_final: Positive | None = Field(
        None, description="falls linearly to it at max_versions; default: constant"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    max_grad_norm: Positive = Field(1.0, description="clipping")
    minibatches: Count = Field(2, description="optimiser steps a batch and epoch")
    epochs: Count = Field(1, description="passes over a batch")
    micro_batch_tokens: Count = Field(16384, description="memory: padded tokens a forward pass")
    is_truncation: Positive = Field(
        2.0, description="upper bound of the token-level importance ratio"
    )
    advantage_std_offset: Annotated[float, Field(ge=0)] = Field(
        0.3,
        description="added to a group's standard deviation, so that nearly solved groups do not shout",
    )
    temperature: Positive = Field(
        1.0, description="temperature that is assumed for steps that do not record their own"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="cpu although there is a GPU"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="faster passes with less memory; the weights that learn are float32 either way",
    )
    threads: Count = Field(1, description="CPU cores for torch")
    seed: int = Field(0, description="repeat runs")


class RolloutSettings(_Section):
    """A rollout worker and its vLLM server."""

    worker_id: Name = Field("worker-0", description="several workers: one name each")
    attach_url: str | None = Field(
        None, description="a vLLM server that runs already, instead of starting one"
    )
    model_path: Path | None = Field(
        None, description="directory the engine boots with; default trainer.model_path"
    )
    host: str = Field("127.0.0.1", description="gateways on other machines")
    port: Port = Field(8200, description="the port is taken")
    public_url: str | None = Field(
        None, description="the URL that gateways are told; needed where rollout.host is 0.0.0.0"
    )
    served_model_name: str = Field("policy", description="the name that agents ask for")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="float32 for exact agreement; versions are published in it, for auto in the model's own",
    )
    max_model_len: Count = Field(4096, description="longest prompt and reply, tokens")
    max_num_seqs: Count = Field(256, description="requests in one engine step")
    kv_cache_mb: Count = Field(1024, description="memory for the KV cache on CPU")
    tool_parser: str | None = Field(None, description="vLLM tool-call parser")
    tool_parser_plugin: Path | None = Field(
        None, description="file that registers a parser of your own"
    )
    reasoning_parser: str | None = Field(None, description="vLLM reasoning parser")
    extra_args: tuple[str, ...] = Field((), description="any further vLLM argument")
    heartbeat_s: Positive = Field(2.0, description="how soon a dead worker is noticed")
    startup_timeout_s: Positive = Field(600.0, description="large models")
    drain_timeout_s: Positive | None = Field(
        None,
        description="longest wait for calls in flight when stopping; default what up.stop_timeout_s leaves",
    )
    serve_base: bool = Field(
        False, description="serve the boot weights before the first version exists"
    )


class UpSettings(_Section):
    """`clawstream up`: all processes on one machine."""

    processes: tuple[str, ...] = Field(
        ("broker", "gateway", "assemble", "reward", "admit", "lake", "trainer", "rollout"),
        description="leave some out, or run them elsewhere",
    )
    restart_delay_s: Positive = Field(
        1.0, description="wait before a restart; doubles up to 30 s while it fails"
    )
    drain_timeout_s: Positive = Field(60.0, description="longest wait for lag 0 when stopping")
    stop_timeout_s: Positive = Field(
        45.0, description="longest wait for one process to end before SIGKILL"
    )


class DemoSettings(_Section):
    """`python -m demo`."""

    seed: int = Field(0, description="another run")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the saved model and of the engine"
    )
    versions: Count = Field(45, description="shorter or longer training")
    groups_per_batch: Count = Field(16, description="groups a batch")
    concurrency: Count = Field(128, description="agents at once")
    eval_tasks: Count = Field(200, description="held-out tasks before and after")
    warm_start_steps: Count = Field(250, description="supervised steps before RL")
    staleness: Annotated[int, Field(ge=0)] = Field(
        1, description="versions that rollouts may run ahead"
    )
    stream_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="share of episodes that stream"
    )


class Settings(_Section):
    """Everything. The name of a field, with dots, is the name on the command line."""

    run_id: Name = Field(
        "default", pattern=f"^{RUN_ID.pattern}$", description="experiments side by side"
    )
    data_dir: Path = Field(Path("data"), description="where everything is kept")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="more or fewer lines"
    )
    kafka: KafkaSettings = KafkaSettings()
    broker: BrokerSettings = BrokerSettings()
    gateway: GatewaySettings = GatewaySettings()
    functions: FunctionSettings = FunctionSettings()
    jobs: JobsSettings = JobsSettings()
    admit: AdmitSettings = AdmitSettings()
    lake: LakeSettings = LakeSettings()
    trainer: TrainerSettings = TrainerSettings()
    rollout: RolloutSettings = RolloutSettings()
    up: UpSettings = UpSettings()
    demo: DemoSettings = DemoSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if 2 * self.jobs.trajectory_timeout_s > self.kafka.steps_retention_s:
            raise ValueError(
                f"jobs.trajectory_timeout_s={self.jobs.trajectory_timeout_s:g} is above half of "
                f"kafka.steps_retention_s={self.kafka.steps_retention_s:g}: payload could be gone before its trajectory closes"
            )
        for name, value in (
            ("jobs.trajectory_timeout_s", self.jobs.trajectory_timeout_s),
            ("jobs.bucket_inactivity_s", self.jobs.bucket_inactivity_s),
            ("jobs.agent_inactivity_s", self.jobs.agent_inactivity_s),
            ("jobs.orphan_after_s", self.jobs.orphan_after_s),
            ("gateway.spool_max_age_s", self.spool_max_age_s),
            ("admit.policy.reward_deadline_s", self.admit.policy.reward_deadline_s),
            ("admit.policy.group_deadline_s", self.admit.policy.group_deadline_s),
        ):
            if self.jobs.closed_horizon_s <= value:
                raise ValueError(
                    f"jobs.closed_horizon_s={self.jobs.closed_horizon_s:g} must exceed {name}={value:g}"
                )
        if (
            self.rollout.drain_timeout_s is not None
            and self.rollout.drain_timeout_s > self._drain_room_s
        ):
            raise ValueError(
                f"rollout.drain_timeout_s={self.rollout.drain_timeout_s:g} must be at least {ENGINE_STOP_S + 1:g} below "
                f"up.stop_timeout_s={self.up.stop_timeout_s:g}: the worker would be killed while it waits"
            )
        for table, days in self.lake.retention_days.items():
            if days * 86400 <= self.spool_max_age_s:
                raise ValueError(
                    f"lake.retention_days.{table}={days:g} must exceed gateway.spool_max_age_s={self.spool_max_age_s:g}: a record "
                    "that comes out of a spool would be written again"
                )
        self._check_awaited()
        if self.trainer.sync_every != self.admit.policy.sync_every:
            raise ValueError(
                f"trainer.sync_every={self.trainer.sync_every} differs from admit.policy.sync_every="
                f"{self.admit.policy.sync_every}: staleness is judged for the version that will train a batch"
            )
        return self

    @property
    def names_functions(self) -> bool:
        """Whether a function of the user's own is named anywhere."""
        jobs, gateway = self.jobs, self.gateway
        named = [
            *jobs.reward_functions.values(),
            *jobs.quality_functions.values(),
            gateway.redaction.rules,
        ]
        return any(is_own(spec) for specs in named for spec in specs) or is_own(
            gateway.compute_reward or ""
        )

    def _check_awaited(self) -> None:
        """Refuse a policy that decides before the configured functions have answered."""
        policy = self.admit.policy
        if policy.required_rewards == () and (counted := self._counted_rewards()):
            raise ValueError(
                f"admit.policy.required_rewards is empty, but jobs.reward_functions gives run {self.run_id} "
                f"{', '.join(counted)}: groups would be decided before these rewards come. Leave it out, so that "
                "all of them are required, or name those that groups wait for"
            )
        if policy.require_assessment is False and self._assessment_decides():
            raise ValueError(
                "admit.policy.require_assessment is false, but min_quality or min_step_quality is set beside "
                f"jobs.quality_functions of run {self.run_id}: trajectories would be admitted before they are "
                "assessed. Leave it out"
            )

    def _counted_rewards(self) -> tuple[str, ...]:
        """The rewards of the run's configured functions that count in the training reward, as `rule/NAME`."""
        weights = self.admit.policy.reward_weights
        names = dict.fromkeys(
            f"rule/{name_in(spec)}" for spec in of_run(self.jobs.reward_functions, self.run_id)
        )
        return tuple(name for name in names if not weights or name in weights)

    def _assessment_decides(self) -> bool:
        policy = self.admit.policy
        has_threshold = policy.min_quality is not None or policy.min_step_quality is not None
        return has_threshold and bool(of_run(self.jobs.quality_functions, self.run_id))

    @property
    def required_rewards(self) -> tuple[str, ...]:
        """What each member of a group needs: as set, else the reward of every configured function that counts."""
        said = self.admit.policy.required_rewards
        return self._counted_rewards() if said is None else said

    @property
    def require_assessment(self) -> bool:
        """Whether groups wait for the quality rules: as set, else where a threshold and rules are configured."""
        said = self.admit.policy.require_assessment
        return self._assessment_decides() if said is None else said

    @property
    def bootstrap_servers(self) -> str:
        """The cluster everything talks to."""
        if self.kafka.bootstrap_servers:
            return self.kafka.bootstrap_servers
        step = 10
        return ",".join(
            f"127.0.0.1:{self.broker.port + step * i}" for i in range(self.broker.nodes)
        )

    @property
    def replication(self) -> tuple[int, int]:
        """Copies of each topic, and how many must have a record before it is acknowledged."""
        embedded = self.broker.nodes if self.kafka.bootstrap_servers is None else 1
        factor = self.kafka.replication_factor or min(3, embedded)
        return factor, self.kafka.min_insync_replicas or max(1, factor - 1)

    @property
    def broker_dir(self) -> Path:
        return self.broker.data_dir or self.data_dir / "broker"

    @property
    def lake_uri(self) -> str:
        return self.lake.uri or str((self.data_dir / "lake").absolute())

    @property
    def spool_dir(self) -> Path:
        return self.gateway.spool_dir or self.data_dir / "spool"

    @property
    def api_keys_file(self) -> Path:
        return self.gateway.api_keys_file or self.data_dir / "api-keys.json"

    @property
    def spool_max_age_s(self) -> float:
        """A trajectory whose records wait longer may be forgotten before they come."""
        return self.gateway.spool_max_age_s or self.jobs.closed_horizon_s / 2

    @property
    def blob_uri(self) -> str:
        return self.gateway.blob_uri or str((self.data_dir / "blobs").absolute())

    @property
    def _drain_room_s(self) -> float:
        return max(1.0, self.up.stop_timeout_s - ENGINE_STOP_S - 1)

    @property
    def rollout_drain_timeout_s(self) -> float:
        return self.rollout.drain_timeout_s or self._drain_room_s

    @property
    def weights_dir(self) -> Path:
        return (self.trainer.weights_dir or self.data_dir / "weights").absolute()

    @property
    def checkpoint_dir(self) -> Path:
        return (self.trainer.checkpoint_dir or self.data_dir / "checkpoints").absolute()
