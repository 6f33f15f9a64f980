"""Do KV events arrive, can they be read, and can a gap be filled?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvproxy.doctor.checks.caching import caching_configured
from kvproxy.doctor.checks.chat import TRIAL_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.doctor.listening import Heard
from kvproxy.doctor.trial import Trial
from kvproxy.errors import ClientError, NotSupported

_ENABLE = (
    'start the engine with `--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv-events"}\'`'
)


@dataclass(frozen=True, slots=True)
class EventSourcesCheck:
    """Whether the engine publishes any. `wanted`: `kvcache.kv_events` is set."""

    engine: Engine
    wanted: bool

    name = "kv event sources"
    calls = 3

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        await self.engine.models()  # what is no engine is told elsewhere
        try:
            sources = await self.engine.sources()
        except NotSupported:
            fix = (
                "set `kv_event_sources` of the endpoint (or of the kvcache filter, where it holds for all) to the "
                "addresses in its `--kv-events-config`; until then "
                "its index is approximate"
            )
            return [warning(self.where, "cannot say where it publishes KV events", fix)] if self.wanted else []
        if sources:
            note = "" if self.wanted else "; `kv_events: true` of the kvcache filter would follow them"
            return [ok(self.where, f"publishes KV events of {len(sources)} rank(s){note}")]
        what = "publishes no KV events, though `kv_events` of the kvcache filter is on"
        fix = f"{_ENABLE}, or set `kv_events: false`"
        return [problem(self.where, what, fix)] if self.wanted else []


@dataclass(frozen=True, slots=True)
class KvEventsCheck:
    """What came over its streams while a prompt was sent."""

    engine: Engine

    name = "kv events"
    calls = TRIAL_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        trial = await self.engine.trial()
        if trial.heard and caching_configured(trial) is False:
            raise ClientError(f"{self.where} has prefix caching off, so there is nothing to publish")
        return list(event_findings(self.where, trial)) if trial.heard else []


def event_findings(where: str, trial: Trial) -> Iterator[Finding]:
    """The verdict on every stream of one engine."""
    for heard in trial.heard:
        if not heard.connected:
            fix = (
                "bind it where the proxy can reach it (`tcp://*:PORT`, not 127.0.0.1), open the port in the firewall, "
                "publish it from the container"
            )
            yield problem(where, f"cannot subscribe to its KV events at {heard.source.endpoint}", fix)
        if heard.malformed:
            what = f"{heard.malformed} KV events could not be read"
            yield problem(where, what, "is another program on that port? Otherwise please report the engine's version")
        yield from _replay(where, heard)
    connected = [heard for heard in trial.heard if heard.connected]
    mine = next((heard for heard in connected if heard.mine is not None), None)
    if mine is not None:
        yield from _mine(where, mine, trial)
    elif connected and not trial.tokens:
        yield warning(where, "KV events cannot be matched: nothing tells the prompt's tokens", "serve /tokenize")
    elif connected:
        seen = sum(heard.batches for heard in connected)
        what = f"published no KV event of a prompt it computed ({seen} batches of other things)"
        fix = f"is this the engine's own port, and is prefix caching on? Otherwise {_ENABLE}"
        yield problem(where, what, fix)


def _replay(where: str, heard: Heard) -> Iterator[Finding]:
    if heard.replays is None:
        fix = "add `replay_endpoint` to `--kv-events-config`"
        yield warning(where, "offers no replay of KV events: after a gap its index stays incomplete", fix)
    elif not heard.replays:
        what = f"its replay socket {heard.source.replay_endpoint} does not answer: a gap cannot be filled"
        yield warning(where, what, "open that port as well as the events' own")


def _mine(where: str, heard: Heard, trial: Trial) -> Iterator[Finding]:
    event = heard.mine
    assert event is not None
    cache = trial.after.cache if trial.after is not None else None
    said = cache.block_tokens if cache is not None else None
    if not event.indexable:
        what = f"its KV events are of the kind {event.spec_kind!r}, which no prefix index can follow"
        yield warning(where, what, "set `kv_events: false`: the approximate index serves hybrid models")
    elif said is not None and said != event.block_tokens:
        what = f"its KV events have blocks of {event.block_tokens} tokens, its /metrics say {said}"
        yield warning(where, what, "is this the engine's own port? Check `--kv-events-config`")
    else:
        what = f"KV events arrive: blocks of {event.block_tokens} tokens, encoded as {heard.encoding}s"
        yield ok(where, what)
