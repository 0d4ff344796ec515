"""Test the configuration of a broker node and the reading of its log. Values in, text out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.runtime.broker.data_dir import new_cluster_id
from clawstream.runtime.broker.embedded import BrokerError, EmbeddedBroker
from clawstream.runtime.broker.jars import Java
from clawstream.runtime.broker.node_config import (
    logs_read,
    plan_node,
    render_log4j2,
    render_properties,
    render_server_properties,
    server_command,
)


def properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def test_one_node_keeps_one_copy_and_refuses_misspelt_topics() -> None:
    told = properties(render_server_properties(plan_node(Path("/data"), 19092)))
    assert told["controller.quorum.voters"] == "1@127.0.0.1:19093"
    assert told["listeners"] == "PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:19093"
    assert told["log.dirs"] == "/data/node-1/records"
    assert told["default.replication.factor"] == told["min.insync.replicas"] == "1"
    assert int(told["broker.session.timeout.ms"]) >= 9000, "a busy machine must not fence it"
    assert told["auto.create.topics.enable"] == "false"
    assert told["message.max.bytes"] == told["replica.fetch.max.bytes"] == "10485760"
    # Each topic sets its own timestamp type.
    assert "log.message.timestamp.type" not in told


def test_an_advertised_name_means_listening_on_all_interfaces() -> None:
    told = properties(render_server_properties(plan_node(Path("/data"), 19092, "broker")))
    assert told["listeners"] == "PLAINTEXT://:19092,CONTROLLER://127.0.0.1:19093"
    assert told["advertised.listeners"] == "PLAINTEXT://broker:19092"


def test_of_several_hosts_each_runs_its_own_node() -> None:
    hosts = ("a", "b", "c")
    plan = plan_node(Path("/data"), 19092, "b", hosts)
    told = properties(render_server_properties(plan))
    assert plan.port == 19102 and told["node.id"] == "2"
    assert told["controller.quorum.voters"] == "1@a:19093,2@b:19103,3@c:19113"
    assert told["listeners"] == "PLAINTEXT://:19102,CONTROLLER://:19103"
    assert told["advertised.listeners"] == "PLAINTEXT://b:19102"
    assert told["broker.session.timeout.ms"] == "3000"
    assert plan_node(Path("/data"), 19092, "a", ("a",)) == plan_node(Path("/data"), 19092, "a")
    # Several hosts must compute the same cluster id; a single host may use a random one.
    assert new_cluster_id(hosts) == new_cluster_id(hosts) != new_cluster_id(("a", "b", "d"))
    assert new_cluster_id() != new_cluster_id()


def test_three_nodes_keep_three_copies_and_need_two() -> None:
    told = properties(
        render_server_properties(plan_node(Path("/data"), 19092, "b", ("a", "b", "c")))
    )
    for name in (
        "default",
        "offsets.topic",
        "transaction.state.log",
        "share.coordinator.state.topic",
    ):
        assert told[f"{name}.replication.factor"] == "3"
    for name in (
        "min.insync.replicas",
        "transaction.state.log.min.isr",
        "share.coordinator.state.topic.min.isr",
    ):
        assert told[name] == "2"


def test_the_log_is_bounded() -> None:
    told = properties(render_log4j2(Path("/data/node-1/broker.log")))
    assert told["appender.file.policies.size.size"] == "10MB"
    assert told["appender.file.strategy.max"] == "2"


def test_how_far_a_node_is_with_its_logs() -> None:
    line = (
        "[x] INFO Completed load of Log(dir=/d/t-0) with 1 segments in 4ms "
        "({}/144 completed in /d) (kafka.log.LogManager)\n"
    )
    assert logs_read("[x] WARN something else\n") is None
    assert logs_read(line.format(9) + line.format(10) + "[x] WARN something else\n") == (10, 144)


def unescape(value: str) -> str:
    r"""Decode a value as java.util.Properties does; its only escapes are \\ and \uXXXX."""
    units, at = bytearray(), 0
    while at < len(value):
        if value[at] != "\\":
            code, at = ord(value[at]), at + 1
        elif value[at + 1] == "u":
            code, at = int(value[at + 2 : at + 6], 16), at + 6
        else:
            code, at = ord(value[at + 1]), at + 2
        units += code.to_bytes(2, "big")
    return units.decode("utf-16-be")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_path_survives_the_properties_file(value: str) -> None:
    rendered = render_properties({"log.dirs": value})
    assert rendered.isascii()
    assert unescape(rendered.removeprefix("log.dirs=").removesuffix("\n")) == value


def test_the_command_names_heap_and_properties_and_quiets_only_java_that_knows_how() -> None:
    plan = plan_node(Path("/data"), 19092)
    command = server_command(Java("java", 17), Path("/jars"), plan, 300)
    assert command[0] == "java"
    assert {"-Xms300m", "-Xmx300m"} <= set(command)
    assert command[-2:] == ["kafka.Kafka", "/data/node-1/server.properties"]
    assert not any("unsafe" in argument for argument in command)
    assert any(
        "unsafe" in argument
        for argument in server_command(Java("java", 25), Path("/jars"), plan, 300)
    )


def test_impossible_brokers_are_refused() -> None:
    with pytest.raises(BrokerError, match="comma"):
        EmbeddedBroker(Path("/a,b"))
    with pytest.raises(BrokerError, match=r"advertised_host=d is none of broker\.hosts, a, b, c"):
        EmbeddedBroker(Path("/data"), advertised_host="d", hosts=("a", "b", "c"))
