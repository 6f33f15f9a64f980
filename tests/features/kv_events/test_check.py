"""The doctor's verdicts on streams: facts in, findings out."""

from __future__ import annotations

import msgspec
import pytest

from kvproxy.base.errors import ClientTimeout
from kvproxy.base.settings.compose import composed
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.cache.clients.tokens import token_array
from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.kv_events.check import judge_events
from kvproxy.features.kv_events.feature import FEATURE
from kvproxy.features.kv_events.settings import EventsMode
from kvproxy.features.kv_events.trial import StreamObservation
from kvproxy.lab.simulator.engine_io import BlockStored as Stored
from kvproxy.lab.simulator.kv_event_publisher import EventEncoder
from kvproxy.operate.doctor.report import Severity
from tests.operate.doctor.test_verdicts import ON, trial

SOURCE = KvEventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


def stored(*, block: int = 16, kind: str | None = "full_attention") -> BlockStored:
    """Return an event about the trial's prompt."""
    return BlockStored((1, 2), None, token_array(list(range(2 * block))), block, spec_kind=kind)


def observed(**values: object) -> StreamObservation:
    """Return a stream that works, but for `values`."""
    fields: dict[str, object] = {"connected": True, "batches": 1, "encoding": "map", "mine": stored(), "replays": True}
    return StreamObservation(SOURCE, **{**fields, **values})  # type: ignore[arg-type]


def test_events_that_name_other_things_than_what_is_reused() -> None:
    """It caches, so the events are of another kind, or of another engine."""
    seen = trial(after=ON, cached=32)
    [found] = judge_events("endpoint a", seen, [observed(mine=None, batches=3)])
    assert (found.severity, "reused 32 tokens the second time" in found.what) == (Severity.PROBLEM, True)
    assert "EAGLE" in found.fix


@pytest.mark.parametrize(
    ("stream", "severity", "said"),
    [
        (observed(), Severity.OK, "blocks of 16 tokens, encoded as maps"),
        (observed(encoding="array"), Severity.OK, "encoded as arrays"),
        (observed(connected=False, mine=None), Severity.PROBLEM, "cannot subscribe to its KV events at tcp://"),
        (
            observed(mine=None, batches=3),
            Severity.PROBLEM,
            "published no KV event of a prompt it computed (3 other batches",
        ),
        (observed(malformed=2), Severity.PROBLEM, "2 KV events could not be read"),
        (observed(replays=False), Severity.WARNING, "replay socket tcp://127.0.0.1:5558 does not answer"),
        (observed(replays=None), Severity.WARNING, "offers no replay"),
        (observed(mine=stored(block=8)), Severity.WARNING, "blocks of 8 tokens, its /metrics report 16"),
        (observed(mine=stored(kind="mamba")), Severity.WARNING, "of the kind 'mamba'"),
    ],
)
def test_kv_events(stream: StreamObservation, severity: Severity, said: str) -> None:
    """One stream's fault is named, the worst first."""
    found = list(judge_events("endpoint a", trial(after=ON), [stream]))
    assert any(one.severity is severity and said in one.what for one in found), found
    assert len([one for one in found if one.severity is not Severity.OK]) == (severity is not Severity.OK)


def test_kv_events_that_nothing_can_be_matched_with() -> None:
    """Neither the answer nor `/tokenize` told the prompt's ids."""
    seen = trial(ids=(), tokenized=ClientTimeout("late"))
    assert [one.what for one in judge_events("e", seen, [observed(mine=None)])] == [
        "KV events cannot be matched: the prompt's tokens are unknown"
    ]


def test_events_that_cannot_be_read() -> None:
    """Another program publishes on the engine's port."""
    heard = StreamObservation(KvEventSource(0, "tcp://127.0.0.1:5557"), connected=True)
    heard.record_batch([b"topic", b"not eight bytes", b"?"], (1, 2), now=0.0)
    heard.record_batch(
        [b"topic", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0])], (1,), now=3.0
    )
    assert (heard.malformed, heard.batches, heard.encoding, heard.lag_s) == (2, 1, "map", 2.0)
    heard.record_batch([b"topic", (2).to_bytes(8, "big"), msgspec.msgpack.encode([3.0, [], 0])], (1,), now=9.0)
    assert heard.lag_s == 2.0  # one that waited shows less of the clocks than one that did not


@pytest.mark.parametrize("first", ["full_attention", "mamba"])
def test_of_a_hybrid_model_the_event_of_full_attention_is_looked_at(first: str) -> None:
    """Whichever group comes first."""
    kinds = ["full_attention", "mamba"] if first == "full_attention" else ["mamba", "full_attention"]
    events = [
        Stored((1, 2), None, (1, 2, 3, 4), group=number, kind=kind, extra_keys=(None, None))
        for number, kind in enumerate(kinds)
    ]
    payload = EventEncoder(block_size=2).encode_payload(events, ts=1.0)
    seen = StreamObservation(KvEventSource(0, "tcp://127.0.0.1:1", None, "t"))
    seen.record_batch([b"t", (0).to_bytes(8, "big"), payload], [1, 2, 3, 4], now=2.0)
    assert seen.mine is not None
    assert seen.mine.indexable


@pytest.mark.parametrize(("mode", "needed"), [(True, True), ("auto", False), (False, False)])
def test_facts_are_needed_where_every_engine_is_to_publish(mode: EventsMode, needed: bool) -> None:
    """Otherwise only a policy that weighs them makes them worth their cost."""
    assert FEATURE.needs(composed(KvCacheSettings).model_validate({"kv_events": mode})).facts is needed
