"""Causes of broken prefixes, with the engine's own count: named, priced, counted; reused blocks are no break."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, RequestKind
from kvproxy.cache.overlap.facts import Result
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.features.hygiene import prefix_breaks
from kvproxy.features.hygiene.comparison import Cause
from kvproxy.features.hygiene.note import NOTE, PrefixBreak
from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks
from kvproxy.proxy.request.parse import parse_body
from tests.cache.support import NOWHERE, A, B, cluster_of, settings
from tests.features.hygiene.test_prefix_changes import FIRST, MESSAGES, NEXT, Body, agent, dated, edited
from tests.support.clock import FakeClock

BLOCK = 64  # bytes, of four a token


def rendered(body: Body, *, keeps_header: bool) -> bytes:
    """Render a body as an engine does: tools, system, messages; marks and (mostly) the header left out."""
    system = [
        one for one in body.get("system", ()) if keeps_header or not one["text"].startswith("x-anthropic-billing")
    ]
    texts = [json.dumps(each) for each in (*body.get("tools", ()), *system, *body["messages"])]
    return "".join([body.get("thinking", {}).get("type", ""), *texts]).encode()


class Engine:
    """Reuses the blocks that it was sent before, as far as they come from the beginning."""

    def __init__(self, *, keeps_header: bool = False) -> None:
        self._keeps_header = keeps_header
        self.held: set[bytes] = set()

    def prefill(self, body: Body) -> tuple[int, int]:
        """Prompt tokens, and those of them that were cached."""
        text = rendered(body, keeps_header=self._keeps_header)
        ends = range(BLOCK, len(text) + 1, BLOCK)
        cached = next((end for end in reversed(ends) if text[:end] in self.held), 0)
        self.held |= {text[:end] for end in ends}
        return len(text) // 4, cached // 4


class World:
    """A service and two engines; sessions send bodies."""

    def __init__(self, *, keeps_header: bool = False, **cluster: Any) -> None:
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.cluster: Cluster = cluster_of({"a": NOWHERE, "b": NOWHERE}, clock=self.clock, **cluster)
        clusters = {self.cluster.name: self.cluster}
        self.kv = KvCache(settings(), clusters=clusters, metrics=self.metrics, clock=self.clock)
        self.kv.bind_gauges()
        self.engines = {A: Engine(keeps_header=keeps_header), B: Engine(keeps_header=keeps_header)}

    @property
    def breaks(self) -> PrefixBreaks:
        observer = self.kv.observers.by_feature["hygiene"]
        assert isinstance(observer, PrefixBreaks)
        return observer

    def send(
        self, body: Body, *, at: EndpointId = A, session: str | None = "s", client: str = "", tenant: str = "",
        counts: bool = True, **fields: Any,
    ) -> PrefixBreak | None:  # fmt: skip
        """Send a whole request; returns its break."""
        with self.under_way(body, at=at, session=session, client=client, tenant=tenant, counts=counts, **fields) as end:
            self.clock.advance(1.0)
        return end[0]

    @contextmanager
    def under_way(
        self, body: Body, *, at: EndpointId = A, session: str | None = "s", client: str = "", tenant: str = "",
        counts: bool = True, prefilled: bool = True, kind: RequestKind = MESSAGES, **fields: Any,
    ) -> Iterator[list[PrefixBreak | None]]:  # fmt: skip
        """Keep a request between its pick and its end; its break is there afterwards."""
        raw = json.dumps(body).encode()
        parsed = parse_body(kind, raw)
        assert parsed is not None
        request = msgspec.structs.replace(parsed, session_key=session, client=client, **fields)
        facts = self.kv.gather(request, raw, cluster=self.cluster)
        self.kv.placed(facts, at)
        tokens, cached = self.engines[at].prefill(body) if prefilled else (0, 0)
        end: list[PrefixBreak | None] = []
        yield end
        result = Result(at, prefilled, tokens, cached if counts else None, request_id="r1", tenant=tenant)
        self.kv.finished(facts, result)
        self.breaks.learned(facts, result)
        found = result.notes.get(NOTE)
        assert found is None or isinstance(found, PrefixBreak)
        end.append(found)

    def tokens(self, cause: Cause, client: str = "") -> float:
        return self.metrics.registry.get_sample_value(
            "kvproxy_prefix_break_tokens_total", {"cause": cause, "client": client}
        ) or 0.0  # fmt: skip


def billed(body: Body, value: int) -> Body:
    block = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={value:05x};"}
    return edited(body, "system", lambda blocks: [block, *blocks])


def other(turns: int) -> Body:
    """Another task."""
    return {**agent(turns), "tools": [], "system": [{"type": "text", "text": "Another."}]}


LONG, LONGER, LONGEST = agent(12), agent(13), agent(14)


def test_a_break_costs_what_was_computed_again() -> None:
    """Not more than the engine says it did not reuse; told by cause and client."""
    world = World()
    world.send(edited(LONG, "system.0.text", dated("2026-09-01")), client="codex")
    found = world.send(edited(LONGER, "system.0.text", dated("2026-09-02")), client="codex", tenant="")
    assert found is not None
    assert (found.cause, found.part, found.seconds) == (Cause.DATE_OR_ID, "system block 1, line 3", None)
    again = sum(len(json.dumps(message)) for message in LONG["messages"]) // 4
    assert again * 0.9 < found.tokens < again * 1.2
    assert world.tokens(Cause.DATE_OR_ID, "codex") == found.tokens


def test_learned_speeds_price_it() -> None:
    """A cluster that learns speeds tells seconds too."""
    world = World(policy="kv_aware")
    assert world.cluster.speeds is not None
    world.cluster.speeds.observe(A, (1.0, 1000.0, 500_000.0, 0.0), 0.5, world.clock())
    world.send(edited(LONG, "system.0.text", dated("2026-09-01")))
    found = world.send(edited(LONGER, "system.0.text", dated("2026-09-02")))
    assert found is not None
    assert found.seconds is not None
    assert found.seconds >= found.tokens * world.cluster.speeds.seconds[1]


def test_reused_prefixes_are_no_break() -> None:
    """Whatever changed: its template may leave it out."""
    world = World()
    world.send(LONG)
    ignored = {**LONGER, "metadata": {"x": 1}, "mm_processor_kwargs": {"a": 1}}
    assert world.send(ignored) is None
    assert world.breaks.book.returned == 1


def test_changes_count_where_the_engine_tells_nothing() -> None:
    """By the estimate; what only the engine can have lost does not."""
    world = World()
    world.send(LONG, counts=False)
    world.engines[A].held.clear()
    assert world.send(LONGER, counts=False) is None
    found = world.send(edited(LONGEST, "tools", lambda all_: all_[::-1]), counts=False)
    assert found is not None
    assert found.cause is Cause.TOOL_ORDER


def test_an_engine_that_lost_the_prompt() -> None:
    """The same prompt and more, at the same endpoint, and little of it was reused."""
    world = World()
    world.send(LONG)
    world.send(LONGER)
    world.engines[A].held.clear()
    found = world.send(LONGEST)
    assert found is not None
    assert (found.cause, found.part) == (Cause.EVICTED, "engine")
    assert found.tokens > 3000
    assert world.send(agent(15)) is None


def test_an_engine_that_reuses_in_steps_lost_nothing_below_one() -> None:
    """A hybrid model reuses up to the last of its states."""
    world = World()
    world.send(LONG)
    world.send(LONGER)
    indexes = world.kv.overlap.indexes["default"]
    indexes.steps.tell_block_size(A, 8192)
    world.engines[A].held.clear()
    assert world.send(LONGEST) is None


def test_a_turn_served_elsewhere() -> None:
    """By an endpoint that did not hold it."""
    world = World()
    world.send(LONG)
    world.send(LONGER)
    world.send(other(12), at=B, session="other")
    world.send(other(13), at=B, session="other")
    found = world.send(LONGEST, at=B)
    assert found is not None
    assert (found.cause, found.part) == (Cause.MOVED, "engine")


def test_an_engine_that_never_reused_anything_lost_nothing() -> None:
    """It may have no prefix cache."""
    world = World()
    for body in (LONG, LONGER, LONGEST):
        world.engines[A].held.clear()
        assert world.send(body) is None
    world.breaks.tick()


def test_a_header_that_the_engine_keeps() -> None:
    """The client's header is another one in every request; an engine that leaves it out is not blamed on it."""
    world = World(keeps_header=True)
    assert world.send(billed(LONG, 1)) is None
    found = world.send(billed(LONGER, 2))
    assert found is not None
    assert (found.cause, found.part) == (Cause.VOLATILE_HEADER, "system block 1")
    drops = World()
    drops.send(billed(LONG, 1))
    assert drops.send(billed(LONGER, 2)) is None
    drops.engines[A].held.clear()
    evicted = drops.send(billed(LONGEST, 3))
    assert evicted is not None
    assert evicted.cause is Cause.EVICTED


def test_a_header_that_the_engine_keeps_in_a_chat() -> None:
    """It is the first line of the system message."""
    world = World(keeps_header=True)

    def body(turns: int, value: int) -> Body:
        content = f"x-anthropic-billing-header: cch={value:05x};\n{'rule ' * 300}"
        return {"model": "m", "messages": [{"role": "system", "content": content}, *agent(turns)["messages"]]}

    assert world.send(body(12, 1), kind=RequestKind.CHAT) is None
    found = world.send(body(13, 2), kind=RequestKind.CHAT)
    assert found is not None
    assert found.cause is Cause.VOLATILE_HEADER


def test_turns_that_overlap_are_not_compared() -> None:
    """A turn sent before the one before it was over cannot have found it."""
    world = World()
    world.send(LONG)
    world.send(LONGER)
    with world.under_way(LONGEST) as second:
        world.engines[A].held.clear()
        assert world.send(agent(15)) is not None  # what LONGER left is gone
        world.engines[A].held.clear()
    assert second == [None]


def test_prompts_without_a_prefill_are_not_remembered() -> None:
    """A failed attempt, and the client's retry."""
    world = World()
    world.send(LONG)
    with world.under_way(edited(LONGER, "system.0.text", dated("2026-09-02")), prefilled=False) as failed:
        pass
    assert failed == [None]
    assert world.send(LONGER) is None


@pytest.mark.parametrize(
    "change",
    [{"session": None}, {"kind": RequestKind.COMPLETION}],
    ids=["no session", "an API without messages"],
)
def test_requests_that_are_not_followed(change: dict[str, Any]) -> None:
    """Nothing is kept of them."""
    world = World()
    body = {**LONG, "prompt": "x" * 9000}
    assert world.send(body, **change) is None
    assert len(world.breaks.book.sessions) == 0


def test_a_session_that_ends_is_forgotten() -> None:
    """At its client's word."""
    world = World()
    world.send(LONG)
    assert len(world.breaks.book.sessions) == 1
    world.send(LONGER, session_ends=True)
    assert len(world.breaks.book.sessions) == 0


def test_tenants_do_not_share_a_session() -> None:
    """Nor what is said of it."""
    world = World()
    world.send(edited(LONG, "system.0.text", dated("2026-09-01")), tenant="one")
    assert world.send(edited(LONGER, "system.0.text", dated("2026-09-02")), tenant="two") is None


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants beyond the bound share a row."""
    monkeypatch.setattr(prefix_breaks, "MAX_ROWS", 2)
    world = World()
    for tenant in ("one", "two", "three", "four"):
        world.send(edited(LONG, "system.0.text", dated(f"2026-09-01 {tenant}")), tenant=tenant)
        world.send(edited(LONGER, "system.0.text", dated(f"2026-09-02 {tenant}")), tenant=tenant)
    assert {key[2] for key, _ in world.breaks.book.totals} == {"one", "two", "other"}
    assert sum(row.breaks for _, row in world.breaks.book.totals) == 4
    assert [one.tenant for one in world.breaks.book.latest] == ["one", "two", "three", "four"]


def test_held_entries_are_shown() -> None:
    """In bytes."""
    world = World()
    world.send(FIRST)
    held = world.metrics.registry.get_sample_value("kvproxy_kvcache_index_bytes", {"index": "session_parts"})
    assert held == world.breaks.book.sessions.held_bytes > 0


def test_a_short_break_is_not_worth_a_word() -> None:
    """Fewer tokens than a few blocks."""
    world = World()
    world.send(FIRST)
    assert world.send(edited(NEXT, "messages.6.content", lambda text: text[:300])) is None
