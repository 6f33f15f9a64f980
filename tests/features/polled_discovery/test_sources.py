"""Endpoints from a file and from DNS, by themselves and in a cluster that follows them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.background_task import TaskSet, in_slices
from kvproxy.base.errors import DiscoveryError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import composed
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.discovery import Poller, sources_of
from kvproxy.cluster.settings import (
    ClusterSettings,
    DiscoverySettings,
    EndpointSettings,
)
from kvproxy.cluster.sources import entries
from kvproxy.cluster.sources.entries import Answer, LeftOut, Source, split_answer
from kvproxy.features.polled_discovery import sources as polled
from kvproxy.features.polled_discovery.settings import DnsDiscoverySettings
from kvproxy.features.polled_discovery.sources import MAX_FILE_BYTES, DnsDiscovery, FileDiscovery, parse_endpoints
from kvproxy.operate.config.yaml_text import parse_yaml
from tests.cluster.conftest import MakeCluster, configs
from tests.cluster.test_discovery import Bell
from tests.support.clock import FakeClock

LIST = "- {id: a, url: 'http://127.0.0.1:1'}\n- {id: b, url: 'http://127.0.0.1:2', weight: 2}\n"


def discovery_of(**sections: object) -> DiscoverySettings:
    return composed(DiscoverySettings).model_validate(sections)


def good(answer: Answer) -> list[EndpointSettings]:
    """Return the endpoints of an answer that leaves nothing out."""
    assert not [one for one in answer if isinstance(one, LeftOut)]
    return [one for one in answer if isinstance(one, EndpointSettings)]


@pytest.mark.parametrize(
    "text",
    [
        LIST,
        json.dumps([{"id": "a", "url": "http://127.0.0.1:1"}, {"id": "b", "url": "http://127.0.0.1:2", "weight": 2}]),
    ],
)
def test_yaml_and_json_are_read(text: str) -> None:
    """A list of endpoints as in the configuration."""
    endpoints = good(parse_endpoints(text.encode()))
    assert [(e.id, e.url, e.weight) for e in endpoints] == [
        ("a", "http://127.0.0.1:1", 1),
        ("b", "http://127.0.0.1:2", 2),
    ]


def test_a_mapping_of_urls_is_read() -> None:
    """The short form of the configuration."""
    assert [e.id for e in good(parse_endpoints(b"a: http://127.0.0.1:1\n7: http://127.0.0.1:2\n"))] == ["a", "7"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "not an empty one"),
        (b"[]", "not an empty one"),
        (b"{}", "not an empty one"),
        (b"just words", "expected a list"),
        (b"- {id: a", "not readable as YAML or JSON"),
        (b"\xff\xfe\xff", "not readable as YAML or JSON"),
        (b"[" * 600, "not readable as YAML or JSON"),
        (b"a: http://x\nb: http://y\na: http://z\n", "line 3, column 1: duplicate key 'a'"),
        (b"- {id: a, url: 'http://x', id: b}", "line 1, column 28: duplicate key 'id'"),
    ],
)
def test_a_bad_file_says_why(text: bytes, complaint: str) -> None:
    """With the place where it is wrong."""
    with pytest.raises(DiscoveryError, match=complaint):
        parse_endpoints(text)


def test_words_and_times_are_the_text_they_look_like() -> None:
    """As in the configuration: `no` is no boolean and `22:22` no number in base sixty."""
    found = good(parse_endpoints(b"no: http://x\n22:22: http://y\n007: http://z\n1e3: http://w\n"))
    assert [endpoint.id for endpoint in found] == ["no", "22:22", "007", "1e3"]
    (listed,) = good(parse_endpoints(b"- {id: on, url: http://x, models: [no, 12:30]}"))
    assert (listed.id, listed.models) == ("on", ("no", "12:30"))


def test_values_come_from_the_environment_as_in_the_configuration() -> None:
    """In lists and in mappings, numbers included, with defaults, and a dollar sign where two are written."""
    env = {"HOST": "10.0.0.7", "WEIGHT": "2.5", "KEY": "sk-1"}
    text = b"- {id: a, url: 'http://${HOST}:${PORT:-8000}', weight: '${WEIGHT}', api_key: '${KEY}', labels: {p: $$1}}"
    (a,) = good(parse_endpoints(text, env=env, credentials=True))
    assert a.api_key is not None
    assert (a.url, a.weight, a.labels["p"]) == ("http://10.0.0.7:8000", 2.5, "$1")
    assert a.api_key.get_secret_value() == "sk-1"
    assert [one.url for one in good(parse_endpoints(b"b: http://${HOST}:1", env=env, credentials=True))] == [
        "http://10.0.0.7:1"
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"- {id: a, url: 'http://${NOWHERE}:1'}", "[0]: url: environment variable NOWHERE is not set"),
        (b"- {id: a, url: 'http://x', weight: '${heavy-1}'}", "[0]: weight: a placeholder is written"),
        (b"a: http://${NOWHERE}", "a: url: environment variable NOWHERE is not set"),
        (b"- {id: a, url: 'http://x', weight: '${WORD}'}", "[0]: weight"),
        (b"- {id: a, url: '${WORD}'}", "[0]: must start with http"),
        (b"- {id: a}", "[0]: url: Field required"),
        (b"- {id: a, url: 'http://x', wait: 1}", "[0]: wait: Extra inputs"),
        (b"a: ftp://x", "a: the scheme must be http or https"),
        (b"- just words", "[0]: expected an object with the fields of an endpoint"),
        (b"- {id: a, url: 'http://x', 7: 1}", "[0]: 7"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(text: bytes, complaint: str) -> None:
    """With its place; what a variable holds is not shown."""
    (one,) = parse_endpoints(text, env={"WORD": "sesame"}, credentials=True)
    assert isinstance(one, LeftOut)
    assert str(one).startswith(complaint)
    assert "sesame" not in str(one)


@pytest.mark.parametrize(
    "fields",
    [
        "api_key: {file: /etc/passwd}",
        "api_key: sk-1",
        "ca_file: /etc/passwd",
        "cert_file: /x",
        "key_file: /x",
        "labels: {a: '${HOME}'}",
    ],
)
def test_a_file_names_no_credential_unless_that_is_allowed(fields: str) -> None:
    """Nothing is read; the others of the file stay."""
    text = f"- {{id: a, url: 'http://x', {fields}}}\n- {{id: b, url: 'http://y'}}\n".encode()
    bad, b = parse_endpoints(text, env={"HOME": "/root"})
    assert isinstance(bad, LeftOut)
    assert "credentials: true" in bad.why
    assert not isinstance(b, LeftOut)
    allowed, _ = parse_endpoints(text, env={"HOME": "/root"}, credentials=True)
    assert not isinstance(allowed, LeftOut) or "cannot read" in allowed.why or "control character" in allowed.why


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=12), below, max_size=4),
    max_leaves=12,
)


FIELDS = st.dictionaries(st.sampled_from(sorted(EndpointSettings.model_fields)), JSON, max_size=6)


@given(st.lists(JSON | FIELDS, max_size=3), st.booleans())
def test_no_entry_stops_another(odd: list[object], credentials: bool) -> None:
    """Whatever it is: the good one beside it is there."""
    good_one = {"id": "good", "url": "http://127.0.0.1:1"}
    text = json.dumps([*odd, good_one, *odd]).encode()
    answer = parse_endpoints(text, credentials=credentials)
    assert len(answer) == 2 * len(odd) + 1
    assert answer[len(odd)] == EndpointSettings(id="good", url="http://127.0.0.1:1")


async def test_a_files_values_come_from_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is what the file is read with."""
    path = tmp_path / "endpoints.yaml"
    path.write_text("a: http://${ENGINE_HOST}:1\n")
    monkeypatch.setenv("ENGINE_HOST", "127.0.0.1")
    assert [one.url for one in good(await FileDiscovery(path, credentials=True).endpoints())] == ["http://127.0.0.1:1"]


def test_complaints_show_no_keys() -> None:
    """A typing error beside a secret must not print the secret."""
    for credentials in (False, True):
        text = b"- {id: a, url: 'http://x', api_key: [sk-secret], wait: sk-other}"
        (one,) = parse_endpoints(text, credentials=credentials)
        assert isinstance(one, LeftOut)
        assert "sk-" not in str(one)


async def test_a_file_is_parsed_when_its_text_changes(tmp_path: Path) -> None:
    """Looking at an unchanged file costs one read."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(LIST)
    discovery = FileDiscovery(path)
    first = await discovery.endpoints()
    assert await discovery.endpoints() is first
    path.write_text(LIST.replace("weight: 2", "weight: 3"))
    assert [e.weight for e in good(await discovery.endpoints())] == [1, 3]


async def test_a_bad_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand endpoints would take seconds at each poll; a good text is read at once afterwards."""
    parsed: list[bytes] = []

    def parse(text: bytes, **how: Any) -> Answer:
        parsed.append(text)
        return parse_endpoints(text, **how)

    monkeypatch.setattr(polled, "parse_endpoints", parse)
    path = tmp_path / "endpoints.json"
    path.write_text(json.dumps({f"e{number}": "http://127.0.0.1:1" for number in range(20_000)}))
    discovery = FileDiscovery(path)
    for _ in range(3):
        with pytest.raises(DiscoveryError, match="more than 10000 endpoints"):
            await discovery.endpoints()
    assert len(parsed) == 1
    path.write_text(LIST)
    assert [one.id for one in good(await discovery.endpoints())] == ["a", "b"]


@pytest.mark.parametrize("line", ["e{0}: http://127.0.0.1:1\n", "- {{id: e{0}, url: 'http://127.0.0.1:1'}}\n", "- 1\n"])
def test_yaml_is_read_no_further_than_what_is_kept(line: str) -> None:
    """As nodes, a file of four megabytes would take a minute and most of a gigabyte, some of it for good."""
    text = "".join(line.format(number) for number in range(10_001)) + "{ not YAML"
    with pytest.raises(DiscoveryError, match=r"line 10001, .*more than 10000 entries"):
        parse_endpoints(text.encode())


def test_json_is_not_read_as_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML's parser takes a hundred times as long; it is for YAML, and for the place where JSON is wrong."""
    texts: list[str] = []

    def parse(text: str, **how: Any) -> tuple[Any, list[Problem]]:
        texts.append(text)
        return parse_yaml(text, **how)

    monkeypatch.setattr(polled, "parse_yaml", parse)
    good(parse_endpoints(json.dumps({"a": "http://127.0.0.1:1"}).encode()))
    assert texts == []
    good(parse_endpoints(LIST.encode()))
    with pytest.raises(DiscoveryError, match="line 2, column 1: duplicate key 'a'"):
        parse_endpoints(b'{"a": "http://127.0.0.1:1",\n"a": "http://127.0.0.1:2"}')
    assert len(texts) == 2


async def test_missing_and_huge_files_are_errors(tmp_path: Path) -> None:
    """A huge one is not even parsed."""
    with pytest.raises(FileNotFoundError):
        await FileDiscovery(tmp_path / "none").endpoints()
    path = tmp_path / "huge"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(DiscoveryError, match="larger than"):
        await FileDiscovery(path).endpoints()


async def test_dns_makes_one_endpoint_an_address() -> None:
    """Every address once, in a stable order, IPv6 in brackets."""
    asked: list[Any] = []

    async def resolve(*args: Any, **kwargs: Any) -> Sequence[tuple[Any, ...]]:
        asked.append((args, kwargs))
        addresses = ["10.0.0.2", "10.0.0.1", "::1", "10.0.0.2"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 8000)) for address in addresses]

    settings = DnsDiscoverySettings(host="engines.local", port=8000, models=("m",))
    endpoints = good(await DnsDiscovery(settings, resolve=resolve).endpoints())
    assert [(e.id, e.url) for e in endpoints] == [
        ("engines.local@10.0.0.1", "http://10.0.0.1:8000"),
        ("engines.local@10.0.0.2", "http://10.0.0.2:8000"),
        ("engines.local@::1", "http://[::1]:8000"),
    ]
    assert {e.models for e in endpoints} == {("m",)}
    assert {e.server_name for e in endpoints} == {"engines.local"}
    assert [e.instance_id for e in endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000", "[::1]:8000"]
    assert asked[0][0] == ("engines.local", 8000)


async def test_a_name_that_cannot_be_resolved_is_named() -> None:
    """The system's own error does not say which."""

    async def resolve(*args: Any, **kwargs: Any) -> Sequence[tuple[Any, ...]]:
        raise socket.gaierror(-2, "Name or service not known")

    settings = DnsDiscoverySettings(host="engines.local", port=8000)
    with pytest.raises(DiscoveryError, match=r"'engines.local' cannot be resolved: Name or service not known"):
        await DnsDiscovery(settings, resolve=resolve).endpoints()


async def test_dns_asks_the_system_by_default() -> None:
    """In a thread of its own."""
    endpoints = good(await DnsDiscovery(DnsDiscoverySettings(host="127.0.0.1", port=81, scheme="https")).endpoints())
    assert [e.url for e in endpoints] == ["https://127.0.0.1:81"]


def test_sources_follow_the_configuration() -> None:
    """Each with its interval."""
    settings = discovery_of(file={"path": "x"}, dns={"host": "h", "port": 1, "interval": 7})
    assert [(source.name, source.interval_s) for source in sources_of(settings)] == [("file", 2), ("dns", 7)]
    assert sources_of(discovery_of()) == []


async def test_a_cluster_follows_its_file(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """The first request finds the endpoints; later changes arrive; a broken file changes nothing."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(LIST)
    bell = Bell()
    cluster = Cluster(
        "c",
        composed(ClusterSettings)(discovery=discovery_of(file={"path": str(path)})),
        metrics=Metrics(),
        clock=FakeClock(),
        rng=random.Random(1),
        sleep=bell,
    )

    def ids() -> list[str]:
        return [str(endpoint.id) for endpoint in cluster.endpoints]

    assert ids() == []
    async with cluster:
        assert ids() == ["a", "b"]
        await asyncio.sleep(0)
        path.write_text("- {id: b, url: 'http://127.0.0.1:2'}\n")
        await bell.rung()
        assert ids() == ["b"]
        path.write_text("- {")
        await bell.rung()
        assert ids() == ["b"]
        cluster.apply_endpoints(configs("z"))
        assert ids() == ["z", "b"]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("discovery")]


async def test_omitted_objects_are_named_counted_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And gone when it is corrected; a file of nothing but bad ones changes nothing."""
    path, bell, metrics = tmp_path / "endpoints.yaml", Bell(), Metrics()
    path.write_text("a: http://127.0.0.1:1\nb: nonsense\n")
    discovery = discovery_of(file={"path": str(path)})
    cluster = Cluster(
        "c",
        composed(ClusterSettings)(discovery=discovery),
        metrics=metrics,
        clock=FakeClock(),
        rng=random.Random(1),
        sleep=bell,
    )

    def counted() -> float | None:
        labels = {"cluster": "c", "source": "file"}
        return metrics.registry.get_sample_value("kvproxy_discovery_left_out", labels)

    async with cluster:
        await bell.asleep()
        assert [str(one.id) for one in cluster.endpoints] == ["a"]
        assert counted() == 1
        assert [one.name for one in cluster.poller.left_out["file"]] == ["b"]
        assert "discovery c/file leaves out b: must start with http" in caplog.text
        path.write_text("b: nonsense\n")
        await bell.rung()
        assert [str(one.id) for one in cluster.endpoints] == ["a"]
        assert "no endpoint of it can be used" in cluster.poller.complaints["file"]
        path.write_text("b: http://127.0.0.1:2\n")
        await bell.rung()
        assert [str(one.id) for one in cluster.endpoints] == ["b"]
        assert (counted(), dict(cluster.poller.left_out)) == (0, {})


async def test_a_pipe_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    """It is not waited for; the repaired file is read."""
    path = tmp_path / "endpoints.yaml"
    os.mkfifo(path)
    discovery = FileDiscovery(path)
    with pytest.raises(OSError, match="not a regular file"):
        await discovery.endpoints()
    path.unlink()
    path.write_text("a: http://127.0.0.1:1\n")
    assert [one.id for one in good(await discovery.endpoints())] == ["a"]


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), "Temporary failure"),
        (TimeoutError(), "is not resolved within"),
    ],
)
async def test_a_name_that_is_gone_after_it_was_there_changes_nothing(error: OSError, complaint: str) -> None:
    """NXDOMAIN, SERVFAIL and a resolver that hangs, after a thousand addresses."""
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(1000)]
    failing = False

    async def resolve(*_: Any, **__: Any) -> Sequence[tuple[Any, ...]]:
        if failing:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 8000)) for address in addresses]

    known: dict[str, Sequence[EndpointSettings]] = {}
    dns = DnsDiscovery(DnsDiscoverySettings(host="engines.local", port=8000), resolve=resolve)
    async with TaskSet() as tasks:
        poller = Poller(
            "c",
            [Source("dns", dns, 1)],
            tasks=tasks,
            members=SimpleNamespace(named_by=known.get, apply_source=known.__setitem__),
            metrics=Metrics(),
        )
        await poller.ask_all()
        assert len(known["dns"]) == 1000
        failing = True
        await poller.ask_all()
        assert len(known["dns"]) == 1000
        assert complaint in poller.complaints["dns"]


async def test_a_thousand_addresses_do_not_hold_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read and checked in slices, and not again while they stay."""
    monkeypatch.setattr(polled, "in_slices", partial(in_slices, slice_s=0.0))
    monkeypatch.setattr(entries, "in_slices", partial(in_slices, slice_s=0.0))
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(1000)]

    async def resolve(*_: Any, **__: Any) -> Sequence[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 8000)) for address in addresses]

    async def turns_of(work: Awaitable[Any]) -> tuple[int, Any]:
        turns = 0
        task = asyncio.ensure_future(work)
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, task.result()

    checked: list[str] = []

    def refuse(one: EndpointSettings) -> str:
        checked.append(one.id)
        return ""

    dns = DnsDiscovery(DnsDiscoverySettings(host="engines.local", port=8000), resolve=resolve)
    turns, answer = await turns_of(dns.endpoints())
    assert turns >= 1000
    turns, (known, _) = await turns_of(split_answer(answer, refuse=refuse))
    assert turns >= 1000
    assert len(checked) == 1000
    del addresses[0]
    again = await dns.endpoints()
    assert list(map(id, again)) == list(map(id, answer[1:]))
    await split_answer(again, known=known, refuse=refuse)
    assert len(checked) == 1000
