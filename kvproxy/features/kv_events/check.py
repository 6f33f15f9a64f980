"""Do KV events arrive, can they be read, and can a gap be filled?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.features.kv_events.trial import StreamObservation, WatchedStreams
from kvproxy.operate.doctor.check_trial import TRIAL_CALLS, caching_enabled
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.flags import EVENTS_FLAG, SGLANG_EVENTS_FLAG
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning
from kvproxy.operate.doctor.trial import Trial

_ENABLE = {
    EngineKind.VLLM: f"start the engine with `{EVENTS_FLAG}`",
    EngineKind.SGLANG: f"start the engine with `{SGLANG_EVENTS_FLAG}`",
}


@check("kv event sources", calls=3)
async def check_event_sources(engine: EngineFacts) -> Sequence[Finding]:
    """Check that the engine publishes KV events, as `kv_events` of the kvcache filter expects."""
    await engine.list_models()  # a server that is no engine is reported elsewhere
    follows = engine.plan.follows
    kind = await engine.find_kind()
    try:
        sources = await engine.list_sources()
    except NotSupported:
        if follows is None or (not follows.required and kind is EngineKind.UNKNOWN):
            return []
        fix = (
            "set `kv_event_sources` of the endpoint (or of the kvcache filter, where it holds for all) to the "
            "addresses in its `--kv-events-config`; until then its index is approximate"
        )
        return [warning(engine.where, "does not report where it publishes KV events", fix)]
    if sources:
        note = "" if follows is not None else "; `kv_events: auto` of the kvcache filter would follow them"
        return [ok(engine.where, f"publishes KV events of {len(sources)} rank(s){note}")]
    if follows is None:
        return []
    enable = _ENABLE.get(kind, _ENABLE[EngineKind.VLLM])
    if not follows.required:
        what = "publishes no KV events: its index follows only what is routed there"
        return [warning(engine.where, what, enable)]
    what = "publishes no KV events, though `kv_events: true` of the kvcache filter requires them"
    return [problem(engine.where, what, f"{enable}, or set `kv_events: auto`, which follows the other engines")]


@check("kv events", calls=TRIAL_CALLS)
async def check_kv_events(engine: EngineFacts) -> Sequence[Finding]:
    """Check the KV events that arrive while a prompt is sent."""
    trial = await engine.trials.try_generating()
    observed = next((watch.observed for watch in trial.watches if isinstance(watch, WatchedStreams)), None)
    if observed is None:
        return []
    if caching_enabled(trial) is False:
        raise ClientError(f"{engine.where} has prefix caching off, so there is nothing to publish")
    return list(judge_events(engine.where, trial, observed, await engine.find_kind()))


def judge_events(
    where: str, trial: Trial, observed: Sequence[StreamObservation], kind: EngineKind = EngineKind.VLLM
) -> Iterator[Finding]:
    """Yield the verdict on every stream of one engine."""
    for stream in observed:
        if not stream.connected:
            fix = (
                "bind it where the proxy can reach it (`tcp://*:PORT`, not 127.0.0.1), open the port in the firewall, "
                "publish it from the container"
            )
            yield problem(where, f"cannot subscribe to its KV events at {stream.source.endpoint}", fix)
        if stream.malformed:
            what = f"{stream.malformed} KV events could not be read"
            yield problem(where, what, "is another program on that port? Otherwise please report the engine's version")
        yield from _replay(where, stream)
    connected = [stream for stream in observed if stream.connected]
    mine = next((stream for stream in connected if stream.mine is not None), None)
    if mine is not None:
        yield from _mine(where, mine, trial)
    elif connected and not trial.tokens:
        yield warning(where, "KV events cannot be matched: the prompt's tokens are unknown", "serve /tokenize")
    elif connected:
        seen = sum(stream.batches for stream in connected)
        what = f"published no KV event of a prompt it computed ({seen} other batches)"
        fix = f"is this the engine's own port, and is prefix caching on? Otherwise {_ENABLE[kind]}"
        cached = trial.second.cached_tokens
        if seen and cached:
            what += f", of which it reused {cached} tokens the second time"
            fix = (
                "is this the engine's own port? With speculative decoding (EAGLE, MTP) it may name pairs of tokens in "
                "an "
                "unknown way: the proxy ignores events that announce less than is reused; `kv_events: false` saves "
                "following them"
            )
        yield problem(where, what, fix)


def _replay(where: str, stream: StreamObservation) -> Iterator[Finding]:
    if stream.replays is None:
        fix = "add `replay_endpoint` to `--kv-events-config`"
        yield warning(where, "offers no replay of KV events: after a gap its index stays incomplete", fix)
    elif not stream.replays:
        what = f"its replay socket {stream.source.replay_endpoint} does not answer: a gap cannot be filled"
        yield warning(where, what, "open that port as well as the events' own")


def _mine(where: str, stream: StreamObservation, trial: Trial) -> Iterator[Finding]:
    event = stream.mine
    assert event is not None
    cache = trial.after.cache if trial.after is not None else None
    said = cache.block_tokens if cache is not None else None
    if not event.indexable:
        what = f"its KV events are of the kind {event.spec_kind!r}, which no prefix index can follow"
        yield warning(where, what, "set `kv_events: false`: the approximate index serves hybrid models")
    elif said is not None and said != event.block_tokens:
        what = f"its KV events have blocks of {event.block_tokens} tokens, its /metrics report {said}"
        yield warning(where, what, "is this the engine's own port? Check `--kv-events-config`")
    else:
        what = f"KV events arrive: blocks of {event.block_tokens} tokens, encoded as {stream.encoding}s"
        yield ok(where, what)
