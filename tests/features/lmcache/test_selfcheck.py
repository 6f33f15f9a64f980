"""A setup that will never hit says so."""

from __future__ import annotations

import logging

import pytest

from kvproxy.base.errors import ClientError, ClientTimeout, NotSupported
from kvproxy.features.lmcache.connection import CONTRADICTIONS, PATIENCE_S, EmptyLookups, check_provider
from tests.features.lmcache.test_lookup import Answering


class Registry(Answering):
    """Instances and index size as given, or an error."""

    def __init__(self, *names: str, chunks: int = 10, error: ClientError | None = None) -> None:
        super().__init__()
        self.names = names
        self.chunks = chunks
        self.error = error

    async def instances(self) -> frozenset[str]:
        if self.error is not None:
            raise self.error
        return frozenset(self.names)

    async def indexed_chunks(self) -> int:
        return self.chunks


async def test_a_good_setup_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await check_provider(Registry("a", "b"), {"a", "b"})
    assert not caplog.records


async def test_ids_that_do_not_meet_are_named_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    await check_provider(Registry("lmcache-0"), {"a"})
    assert "'lmcache-0' is no endpoint's instance_id; known: a" in caplog.text
    assert "instance_id 'a' is not registered" in caplog.text


async def test_nobody_registered(caplog: pytest.LogCaptureFixture) -> None:
    await check_provider(Registry(), {"a"})
    assert len(caplog.records) == 1
    assert "no instance is registered" in caplog.text


async def test_an_empty_index_names_the_causes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await check_provider(Registry("a", chunks=0), {"a"})
    assert "PYTHONHASHSEED" in caplog.text
    assert "chunk size is 256" in caplog.text


async def test_a_service_that_cannot_tell(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await check_provider(Registry(error=NotSupported("no", status=404)), {"a"})
        await check_provider(Registry(error=ClientTimeout("slow")), {"a"})
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def observe(under_test: EmptyLookups, *, cached: int = 512, named: int = 0, ever_hit: bool = False) -> None:
    under_test.observe_lookup(cached_tokens=cached, holders_named=named, ever_hit=ever_hit)


def test_reuse_that_lookups_never_name_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """cached_tokens > 0 while the lookup is empty, again and again: hash seeds or chunk sizes do not match."""
    now = [0.0]
    under_test = EmptyLookups(clock=lambda: now[0])
    for _ in range(10):
        observe(under_test)
        now[0] += 3.0
    assert len(caplog.records) == 1
    assert "512 tokens just now" in caplog.text


def test_a_burst_to_a_fresh_fleet_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """Engines tell LMCache what they store a little later: alike prompts are reused before lookups can name them."""
    now = [0.0]
    under_test = EmptyLookups(clock=lambda: now[0])
    for _ in range(100):
        observe(under_test)
        now[0] += PATIENCE_S / 101
    assert not caplog.records


def test_a_single_contradiction_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """LMCache may have dropped what the engine still holds."""
    now = [0.0]
    under_test = EmptyLookups(clock=lambda: now[0])
    for _ in range(CONTRADICTIONS - 1):
        observe(under_test)
        now[0] += PATIENCE_S
    assert not caplog.records


@pytest.mark.parametrize("harmless", [{"cached": 255}, {"named": 1}, {"ever_hit": True}])
def test_answers_without_a_contradiction(harmless: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """Less than a chunk, a lookup that named a holder, or lookups that work in general."""
    now = [0.0]
    under_test = EmptyLookups(clock=lambda: now[0])
    for _ in range(10):
        observe(under_test, **harmless)
        now[0] += PATIENCE_S
    assert not caplog.records
