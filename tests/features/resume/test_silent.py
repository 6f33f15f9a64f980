"""Streams of engines that stand still: no connection ends, and their probes fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.features.resume.gateway import (
    CHAT,
    COMPLETION,
    Gateway,
    chat_body,
    completion_body,
    gateway,
    read_events,
    text_of,
    usage_of,
)
from tests.features.resume.test_moving import STALL, Client
from tests.support.until import until

PROBES = {"active": True, "interval": "5ms", "unhealthy_threshold": 1}


def fail_probes(both: Gateway) -> None:
    """Have the probes of the first engine fail; its streams stay open."""
    both.engines[0].app.state.faults.values.fail_path = "/health"


def count_failed(both: Gateway) -> float:
    """Return the probes of it that failed."""
    return both.proxy.metric("kvproxy_health_probes_total", cluster="default", endpoint="a", outcome="failed")


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (COMPLETION, completion_body())])
async def test_another_engine_goes_on(path: str, body: dict[str, Any]) -> None:
    """Long before the idle timeout; the answer is that of an undisturbed run."""
    async with gateway("exact", health=PROBES) as both:
        expected = read_events((await both.engines[1].client.post(path, json=body)).text)
        await both.engines[0].faults(**STALL)
        client = Client(both, path, body)
        await client.begun.wait()
        fail_probes(both)
        events = read_events(await client.finish())
        assert text_of(events) == text_of(expected)
        assert usage_of(events) == usage_of(expected)
        assert both.resumed("exact") == 1


async def test_a_stream_waits_where_no_other_engine_could_go_on() -> None:
    """The verdict of probes may be wrong: the stream ends as its engine ends it."""
    async with gateway("exact", engines=1, health=PROBES) as one:
        await one.engines[0].faults(**STALL)
        client = Client(one, CHAT, chat_body())
        await client.begun.wait()
        fail_probes(one)
        await until(lambda: count_failed(one) > 5)
        await one.engines[0].faults(reset=True)
        assert "error" not in (await client.finish())
