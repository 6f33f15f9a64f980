"""Where to subscribe."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from kvproxy.cache.clients.event_sources import (
    KvEventSource,
    WireSources,
    resolve_address,
    sources_from_wire,
    stated_sources,
)
from kvproxy.cluster.settings import EventSources


def sources(answer: object, *, host: str = "10.0.0.9") -> tuple[KvEventSource, ...]:
    return sources_from_wire(msgspec.json.decode(msgspec.json.encode(answer), type=WireSources), host=host)


def entry(endpoint: str | None = "tcp://*:5557", **fields: Any) -> dict[str, Any]:
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, **fields}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://*:5557", "tcp://10.0.0.9:5557"),
        ("tcp://[::]:5557", "tcp://10.0.0.9:5557"),
        ("tcp://[::ffff:127.0.0.1]:5557", "tcp://10.0.0.9:5557"),
        ("ipc:///tmp/events", "ipc:///tmp/events"),
        ("inproc://events", None),
        ("tcp://*:0", None),
        ("tcp://*:99999", None),
        ("tcp://host", None),
        ("", None),
        (None, None),
    ],
)
def test_the_port_after_the_last_colon_at_the_http_host(address: str | None, expected: str | None) -> None:
    """The engine's own view of its host is of no use here."""
    assert resolve_address(address, host="10.0.0.9") == expected


def test_an_ipv6_host_is_written_in_brackets() -> None:
    """As ZMQ wants it."""
    assert resolve_address("tcp://*:5557", host="fd00::9") == "tcp://[fd00::9]:5557"


def test_ranks_of_the_captured_form() -> None:
    """An object keyed by rank; addresses that differ are taken as they are."""
    answer = {
        "0": entry("tcp://*:5557", replay_endpoint="tcp://*:5657", topic="kv"),
        "1": entry("tcp://*:5558", replay_endpoint=None, topic=None),
    }
    assert sources(answer) == (
        KvEventSource(0, "tcp://10.0.0.9:5557", "tcp://10.0.0.9:5657", "kv"),
        KvEventSource(1, "tcp://10.0.0.9:5558"),
    )


def test_ranks_that_show_one_address_publish_on_port_plus_rank() -> None:
    """The configured address, shown for each rank; the replay port moves along."""
    answer = {str(rank): entry("tcp://*:5557", replay_endpoint="tcp://*:5657") for rank in range(2)}
    assert [(s.endpoint, s.replay_endpoint) for s in sources(answer)] == [
        ("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5657"),
        ("tcp://10.0.0.9:5558", "tcp://10.0.0.9:5658"),
    ]


def test_the_array_form() -> None:
    """Entries that name their rank, or stand at it."""
    answer = [entry("tcp://*:1", data_parallel_rank=3), {"endpoint": "tcp://*:2"}]
    assert [(s.dp_rank, s.endpoint) for s in sources(answer)] == [(1, "tcp://10.0.0.9:2"), (3, "tcp://10.0.0.9:1")]


@pytest.mark.parametrize(
    "off",
    [entry(enable_kv_cache_events=False), entry(publisher="null"), entry(publisher=None), entry(None)],
)
def test_streams_that_are_off_are_left_out(off: dict[str, Any]) -> None:
    """Nothing would ever arrive there."""
    assert sources({"0": off}) == ()
    assert sources({"default": entry()}) == (KvEventSource(0, "tcp://10.0.0.9:5557"),)


def test_stated_ports_are_those_of_the_first_rank() -> None:
    """The host is where the engine answers; each rank is one port higher."""
    stated = EventSources(endpoint="tcp://*:5557", replay_endpoint="tcp://0.0.0.0:6000", data_parallel_size=2)
    assert stated_sources(stated, host="10.0.0.1") == (
        KvEventSource(0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6000"),
        KvEventSource(1, "tcp://10.0.0.1:5558", "tcp://10.0.0.1:6001"),
    )


def test_without_an_address_nothing_is_stated() -> None:
    """A replay port alone is no stream, and no port lies beyond the last."""
    assert stated_sources(EventSources(replay_endpoint="tcp://*:5558"), host="h") == ()
    last = EventSources(endpoint="tcp://*:65535", data_parallel_size=2)
    assert [source.dp_rank for source in stated_sources(last, host="h")] == [0]


@pytest.mark.parametrize("address", ["5557", "tcp://*", "tcp://*:0", "http://h:5557", "tcp://h:5557/x", "tcp://h h:1"])
def test_invalid_addresses_are_refused(address: str) -> None:
    """When the configuration is read, not when the proxy runs."""
    with pytest.raises(ValidationError):
        EventSources(endpoint=address)
