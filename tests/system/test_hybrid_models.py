"""Engines of hybrid models through a whole proxy: what is predicted is what they reuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.lab.simulator.kv_event_publisher import EventEncoding, PublisherSettings
from tests.cache.fleet import Place, simulated
from tests.cache.support import long_text
from tests.lab.simulator.support import TINY
from tests.operate.admin.support import admin_of
from tests.support.proxy import RunningProxy
from tests.support.until import until
from tests.support.vllms.hybrid import Checkpoints, HybridSettings, make_hybrid
from tests.system.test_closing_the_loop import chat, complete, proxied, service

STEP = 512
ONLY = "a"


def hybrid(*, ends_only: bool = False, step: int = STEP, **settings: Any) -> HybridSettings:
    """Return settings of a simulated engine that reuses in steps of 16 of its blocks."""
    engine = replace(TINY.engine, **{"capacity_blocks": 4096, **settings})
    return make_hybrid(replace(TINY, engine=engine, max_model_len=32768), Checkpoints(step, ends_only=ends_only))


class Talk:
    """Conversations with one engine behind a proxy."""

    def __init__(self, place: Place, proxy: RunningProxy) -> None:
        self._place = place
        self._proxy = proxy
        self._number = 0

    async def turn(self, *contents: str) -> tuple[int, int]:
        """Predicted tokens and reused ones of one chat."""
        return await self._predicted(await chat(self._proxy.client, *contents))

    async def complete(self, prompt: list[int]) -> tuple[int, int]:
        """Send a prompt of these tokens; returns the same."""
        return await self._predicted((await complete(self._proxy.client, prompt))[1])

    async def talk(self, turns: int) -> list[tuple[int, int]]:
        """Send a conversation from its beginning."""
        self._number += 1
        said = [long_text(f"c{self._number}x", 60 + 7 * self._number)]
        found = []
        for turn in range(turns):
            found.append(await self.turn(*said))
            said += ["ok", long_text(f"m{self._number}x{turn}", 40 + 9 * turn)]
        return found

    async def _predicted(self, reused: int) -> tuple[int, int]:
        """Of the latest request, once the proxy has all that the engine published."""
        publisher = self._place.fleet.engines[ONLY].state.publisher
        if publisher is not None:
            at = {"endpoint": ONLY, "outcome": "applied"}
            await until(lambda: self._proxy.metric("kvproxy_kv_event_batches_total", **at) == publisher.published)
        async with admin_of(self._proxy.proxy) as admin:
            last = (await admin.get("/decisions?limit=1")).json()["decisions"][0]
        assert last["cached_tokens"] == reused
        return last["matched_tokens"], reused


def missed(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return turns with another prediction."""
    return [row for row in rows if row[0] != row[1]]


@pytest.mark.parametrize("ends_only", [False, True])
async def test_the_step_is_learned_from_what_is_reused(ends_only: bool) -> None:
    """Afterwards the text index predicts to the token what a conversation's next turn reuses, but for turns that end
    close to a step; and it is shown."""
    async with simulated(names=(ONLY,), template=hybrid(ends_only=ends_only)) as place, proxied(place) as proxy:
        talk, steps = Talk(place, proxy), service(proxy).overlap.indexes["default"].steps
        for _ in range(6):
            await talk.talk(10)
        assert list(steps.known.values()) == [STEP]
        rows = await talk.talk(10)
        assert max(reused for _, reused in rows) >= 2 * STEP
        assert len(missed(rows)) <= 2
        assert {abs(predicted - reused) for predicted, reused in rows} <= {0, STEP}
        async with admin_of(proxy.proxy) as admin:
            (endpoint,) = (await admin.get("/endpoints")).json()["clusters"]["default"]
        assert endpoint["cache"]["reuse_step_tokens"] == STEP


async def test_a_long_block_is_told_by_the_engine() -> None:
    """One reading of its metrics is enough, and what teaches how many bytes make a token."""
    engine = hybrid(block_size=STEP, capacity_blocks=256)
    async with simulated(names=(ONLY,), template=engine) as place, proxied(place) as proxy:
        await service(proxy).scraper.scrape_all()
        talk = Talk(place, proxy)
        await talk.talk(3)
        rows = await talk.talk(10)
        assert len(missed(rows)) <= 2
        assert {abs(predicted - reused) for predicted, reused in rows} <= {0, STEP}
        assert max(reused for _, reused in rows) >= STEP


@pytest.mark.parametrize("encoding", [EventEncoding.V0_22, EventEncoding.V0_28])
@pytest.mark.parametrize("ends_only", [False, True])
async def test_events_of_each_group_tell_it_all(ends_only: bool, encoding: EventEncoding) -> None:
    """From the first long prompt on, and of prompts that part where no state is: nothing has to be learned."""
    engine = replace(hybrid(ends_only=ends_only), kv_events=PublisherSettings(encoding=encoding))
    async with simulated(names=(ONLY,), template=engine) as place, proxied(place, kv_events=True) as proxy:
        local = service(proxy).overlap.indexes["default"]
        await until(lambda: len(local.exact) == 1)
        talk = Talk(place, proxy)
        rows = [await talk.complete(list(range(1, length))) for length in range(600, 3000, 170)]
        assert missed(rows) == []
        assert max(reused for _, reused in rows) >= 4 * STEP
        system = list(range(5000, 6300))
        rows = [await talk.complete([*system, *range(start, start + 700)]) for start in range(7000, 11000, 1000)]
        assert missed(rows) == []
        assert (rows[1][1] == 0) is ends_only
        assert rows[3][1] == 2 * STEP
