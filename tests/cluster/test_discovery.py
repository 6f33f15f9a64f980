"""Polling of sources that keeps the last good answer, and steps towards a new one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace

import pytest

from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import BadResponse, ClientUnavailable
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.discovery import Poller, steps_towards
from kvproxy.cluster.settings import (
    EndpointSettings,
)
from kvproxy.cluster.sources.entries import CREDENTIALS, LeftOut, Source, split_answer
from kvproxy.cluster.sources.mirror import Mirror
from kvproxy.cluster.sources.watched import Changes, Listing
from tests.cluster.conftest import configs
from tests.support.clock import FakeClock


def test_each_field_with_a_file_or_a_secret_needs_leave() -> None:
    """A field that is added to endpoints is closed to sources, or this test says so."""
    fields = EndpointSettings.model_fields.items()
    secret = {name for name, field in fields if "SecretStr" in str(field.annotation)}
    assert secret | {name for name, _ in fields if name.endswith("_file")} == set(CREDENTIALS)


class Scripted:
    """A discovery that answers or raises what it is told."""

    def __init__(self, answer: Sequence[EndpointSettings] | Exception) -> None:
        self.answer = answer

    async def endpoints(self) -> Sequence[EndpointSettings]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Bell:
    """A sleep that ends when rung; `rung` waits until the poller sleeps again, `asleep` until it does at all."""

    def __init__(self) -> None:
        self._ring = asyncio.Event()
        self._asleep = asyncio.Event()
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._asleep.set()
        await self._ring.wait()
        self._ring.clear()

    async def rung(self) -> None:
        self._asleep.clear()
        self._ring.set()
        await self.asleep()

    async def asleep(self) -> None:
        await asyncio.wait_for(self._asleep.wait(), 60)


async def test_a_poller_passes_on_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    """A failure, an empty answer or a refused one changes nothing; each reason is said once."""
    metrics, bell, updates = Metrics(), Bell(), []
    discovery = Scripted(configs("a"))

    known: dict[str, Sequence[EndpointSettings]] = {}

    def take(source: str, endpoints: Sequence[EndpointSettings]) -> None:
        if any(endpoint.id == "bad" for endpoint in endpoints):
            raise ValueError("bad is bad")
        known[source] = endpoints
        updates.append((source, [endpoint.id for endpoint in endpoints]))

    with caplog.at_level(logging.INFO, logger="kvproxy"):
        async with TaskSet() as tasks:
            sources = [Source("s", discovery, 3)]
            poller = Poller(
                "c",
                sources,
                tasks=tasks,
                members=SimpleNamespace(named_by=known.get, apply_source=take),
                metrics=metrics,
                sleep=bell,
            )
            await poller.ask_all()
            poller.start(at_once=False)
            assert updates == [("s", ["a"])]
            await asyncio.sleep(0)
            for answer in (
                configs("a"),
                OSError("no such host"),
                OSError("no such host"),
                (),
                configs("bad"),
                KeyError("a bug"),
                TimeoutError(),
                configs("a"),
                configs("a", "b"),
            ):
                discovery.answer = answer
                await bell.rung()
    assert updates == [("s", ["a"]), ("s", ["a", "b"])]
    complaints = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [complaint.removeprefix("discovery c/s: ").split(";")[0] for complaint in complaints] == [
        "no such host",
        "it lists no endpoint",
        "bad is bad",
        "KeyError('a bug')",
        "TimeoutError",
    ]
    assert "discovery c/s answers again" in caplog.text
    assert set(bell.asked) == {3}
    counted = {
        outcome: metrics.registry.get_sample_value(
            "kvproxy_discovery_updates_total", {"cluster": "c", "outcome": outcome}
        )
        for outcome in ("changed", "unchanged", "failed")
    }
    assert counted == {"changed": 2, "unchanged": 2, "failed": 6}


async def test_a_refused_answer_is_tried_again() -> None:
    """It never counts as the last good one."""
    bell, tried = Bell(), 0

    def refuse(_source: str, _endpoints: Sequence[EndpointSettings]) -> None:
        nonlocal tried
        tried += 1
        raise ValueError("no")

    source = Source("s", Scripted(configs("a")), 1)
    async with TaskSet() as tasks:
        poller = Poller(
            "c",
            [source],
            tasks=tasks,
            members=SimpleNamespace(named_by=lambda name: None, apply_source=refuse),
            metrics=Metrics(),
            sleep=bell,
        )
        poller.start(at_once=True)
        await bell.asleep()
        await bell.rung()
    assert tried == 2


def test_many_that_come_and_leave_do_so_in_steps() -> None:
    """Changes of those that stay come with the first step; when all are there some leave in each."""
    known = configs(*(f"old-{number}" for number in range(11)), "stays")
    wanted = (*configs(*(f"new-{number}" for number in range(9))), *configs("stays", weight=2))
    sizes: list[tuple[int, int]] = []
    for step in steps_towards(wanted, known):
        assert len({one.id for one in step}) == len(step)
        assert next(one for one in step if one.id == "stays").weight == 2
        sizes.append((sum(one.id.startswith("new") for one in step), sum(one.id.startswith("old") for one in step)))
    assert sizes == [(4, 11), (9, 6), (9, 1), (9, 0)]
    assert step == wanted
    assert list(steps_towards(wanted, wanted)) == [wanted]
    assert list(steps_towards((*wanted, *wanted), ()))[-1] == (*wanted, *wanted)  # whatever is named twice


def test_many_that_change_do_so_in_steps() -> None:
    """Each is there in every step, as before or as wanted; what stays as it is stays the same object, so that nothing
    is done about it."""
    names = [f"pod-{number}" for number in range(12)]
    known = configs(*names, "stays")
    wanted = (*configs(*names, weight=2), *configs("stays"))
    changed: list[int] = []
    for step in steps_towards(wanted, known):
        assert sorted(one.id for one in step) == sorted([*names, "stays"])
        assert next(one for one in step if one.id == "stays") is known[-1]
        changed.append(sum(one.weight == 2 for one in step))
    assert changed == [5, 10, 12]


async def test_a_request_has_its_turn_while_thousands_come() -> None:
    """Between two steps."""
    named = configs(*(f"pod-{number}" for number in range(200)))
    heard: list[int] = []
    turns: list[int] = []

    async def take_turns() -> None:
        while True:
            turns.append(len(heard))
            await asyncio.sleep(0)

    source, answers = Source("file", ListDiscovery(named), 1.0), dict[str, Sequence[EndpointSettings]]()

    def hear(name: str, endpoints: Sequence[EndpointSettings]) -> None:
        answers[name] = endpoints
        heard.append(len(endpoints))

    async with TaskSet() as tasks:
        other = tasks.start(take_turns(), name="requests")
        poller = Poller(
            "c",
            [source],
            tasks=tasks,
            members=SimpleNamespace(named_by=answers.get, apply_source=hear),
            metrics=Metrics(),
        )
        await poller.ask_all()
        other.cancel()
    assert heard == list(range(5, 201, 5))
    assert set(range(10)) <= set(turns)


class ListDiscovery:
    """Knows these."""

    def __init__(self, endpoints: Sequence[EndpointSettings]) -> None:
        self._endpoints = endpoints

    async def endpoints(self) -> Sequence[EndpointSettings]:
        return self._endpoints


async def test_one_bad_endpoint_is_left_out_alone() -> None:
    """Twice the same id, a URL that is none, and what the deployment refuses; a source's endpoints are bounded."""
    answer = (
        *configs("a", "a", "own"),
        EndpointSettings(id="spaces", url="http://not an ip:1"),
        EndpointSettings(id="port", url="http://127.0.0.1:99999"),
        LeftOut("key x", "no URL"),
    )
    endpoints, left_out = await split_answer(answer, refuse=lambda one: "the proxy itself" if one.id == "own" else "")
    assert [one.id for one in endpoints] == ["a"]
    assert [one.name for one in left_out] == ["a", "own", "spaces", "port", "key x"]
    with pytest.raises(BadResponse, match="more than 10000 endpoints from one source"):
        await split_answer(configs("a") * 10_001, refuse=lambda _: "")


async def test_a_source_that_was_away_for_long_is_soon_asked_again() -> None:
    """However often it failed: what it lists is used within ten seconds, of which an attempt may hang for five."""
    pauses: list[float] = []

    class Away:
        async def list_all(self) -> Listing[str]:
            raise ClientUnavailable("away")

        def watch(self, version: str) -> AsyncGenerator[Changes[str]]:
            raise NotImplementedError

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 100:
            raise asyncio.CancelledError

    async def note() -> None: ...

    mirror = Mirror(Away(), clock=FakeClock(), rng=random.Random(1), sleep=sleep)
    with pytest.raises(asyncio.CancelledError):
        await mirror.follow(note)
    assert 3.0 < max(pauses) <= 4.0
    assert mirror.trouble == "away"


async def test_a_watch_that_brings_nothing_but_bookmarks_is_not_followed_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends after a bound, and after a while everything is listed again: a change that it kept back is seen."""
    monkeypatch.setattr("kvproxy.cluster.sources.mirror._LONGEST_WATCH_S", 0.01)
    clock = FakeClock()
    changed = asyncio.Event()

    class Bookmarks:
        lists = 0

        async def list_all(self) -> Listing[str]:
            self.lists += 1
            return Listing({"a": f"as of list {self.lists}"}, str(self.lists))

        async def watch(self, version: str) -> AsyncGenerator[Changes[str]]:
            while True:
                clock.advance(1)
                yield Changes({}, version)
                await asyncio.sleep(0)

    async def note() -> None:
        if mirror.items.get("a") == "as of list 2":
            changed.set()

    mirror = Mirror(Bookmarks(), clock=clock, rng=random.Random(1), sleep=lambda _: asyncio.sleep(0))
    following = asyncio.create_task(mirror.follow(note))
    await asyncio.wait_for(changed.wait(), 60)
    following.cancel()
    await asyncio.wait([following])
