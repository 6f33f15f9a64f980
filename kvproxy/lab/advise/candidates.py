"""Settings worth a simulation: each is today's fleet with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.feature import find_reports
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.routing.registry import policy_types
from kvproxy.cluster.settings import PolicyName
from kvproxy.lab.advise.advice import Advice
from kvproxy.lab.advise.engines import EngineSettingsSeen
from kvproxy.lab.advise.known import more_memory, more_sequences, order_config, spell_advice
from kvproxy.lab.advise.today import BLOCK_TOKENS, Today
from kvproxy.lab.advise.traffic import Occupancy
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.settings import IndexMode
from kvproxy.operate.doctor.flags import Setting

#: Share of the slots in use at a time from which more might help.
_NEARLY_ALL = 0.8
_MORE_MEMORY = 1.1
_HOST_MEMORY = 4.0
#: Prompts up to this many tokens per step leave room for others.
_THRESHOLD = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """Advice to be tried, and the fleet with it. `at_most`: a cost that the simulation leaves out."""

    advice: Advice
    today: Today
    at_most: str = ""


def list_candidates(
    today: Today,
    engines: Sequence[EngineSettingsSeen],
    occupancy: Occupancy,
    *,
    kvcache: KvCacheSettings | None,
) -> list[Candidate]:
    """Return the likeliest to help first: time may run out."""
    found = [
        *_routing(today),
        *_scheduling(today, engines),
        *_events(today, engines, kvcache),
        *_sequences(today, engines, occupancy),
        *_steps(today, engines),
        *_blocks(today, engines),
        *_memory(today, engines),
    ]
    return [one for one in found if one.advice.flags or one.advice.config]


def _with(today: Today, **changes: object) -> Today:
    return replace(today, fleet=replace(today.fleet, **changes))  # type: ignore[arg-type]


def _routing(today: Today) -> Iterator[Candidate]:
    spec = today.spec
    if spec.name is not PolicyName.KV_AWARE:
        other = replace(today, spec=PolicySpec(PolicyName.KV_AWARE))
        what = f"kv_aware instead of {spec.name}"
        yield Candidate(Advice(Setting.POLICY, what, config="policy: kv_aware"), other)
    if policy_types()[spec.name].learns_speeds:
        other = replace(today, spec=replace(spec, queue=not spec.queue))
        what, key = ("without the router queue", "enabled: false") if spec.queue else ("with the router queue", "")
        yield Candidate(Advice(Setting.QUEUE, what, config=f"queue: {{{key}}}    (the cluster)"), other)


def _scheduling(today: Today, engines: Sequence[EngineSettingsSeen]) -> Iterator[Candidate]:
    if policy_types()[today.spec.name].learns_speeds and not today.spec.priority:
        other = replace(today, spec=replace(today.spec, priority=True))
        what = "engines order waiting requests by priority instead of arrival"
        wanting = [one for one in engines if not one.by_priority]
        flags = spell_advice(Setting.SCHEDULING, wanting)
        yield Candidate(Advice(Setting.SCHEDULING, what, flags, order_config(wanting)), other)


def _events(
    today: Today, engines: Sequence[EngineSettingsSeen], kvcache: KvCacheSettings | None
) -> Iterator[Candidate]:
    if kvcache is None or today.fleet.index is IndexMode.EVENTS or today.fleet.instances < 2:
        return
    if not policy_types()[today.spec.name].uses_overlap:
        return
    silent = [one for one in engines if not one.publishes]
    config = "" if find_reports(kvcache) is not None else "kv_events: true    (filter kvcache)"
    what = "cache contents come from KV events"
    advice = Advice(Setting.KV_EVENTS, what, spell_advice(Setting.KV_EVENTS, silent), config)
    yield Candidate(advice, _with(today, index=IndexMode.EVENTS))


def _sequences(today: Today, engines: Sequence[EngineSettingsSeen], occupancy: Occupancy) -> Iterator[Candidate]:
    slots = today.fleet.max_sequences
    if occupancy.answering < _NEARLY_ALL * slots:
        return
    more = more_sequences(slots)
    other = _with(today, max_sequences=more, max_batched_tokens=max(today.fleet.max_batched_tokens, more + 1))
    what = f"{more:,} sequences at a time instead of {slots:,}"
    yield Candidate(Advice(Setting.SEQUENCES, what, spell_advice(Setting.SEQUENCES, engines, more)), other)


def _steps(today: Today, engines: Sequence[EngineSettingsSeen]) -> Iterator[Candidate]:
    tokens = today.fleet.max_batched_tokens
    for other in (4 * tokens, tokens // 4):
        if max(512, today.fleet.max_sequences + 1) <= other <= 65_536:
            what = f"{other:,} tokens a step instead of {tokens:,}"
            advice = Advice(Setting.STEP_TOKENS, what, spell_advice(Setting.STEP_TOKENS, engines, other))
            yield Candidate(advice, _with(today, max_batched_tokens=other))
    if not today.fleet.long_prefill_token_threshold and tokens > _THRESHOLD:
        what = f"of one prompt at most {_THRESHOLD:,} tokens a step"
        advice = Advice(Setting.LONG_PREFILL, what, spell_advice(Setting.LONG_PREFILL, engines, _THRESHOLD))
        yield Candidate(advice, _with(today, long_prefill_token_threshold=_THRESHOLD))


def _blocks(today: Today, engines: Sequence[EngineSettingsSeen]) -> Iterator[Candidate]:
    if today.block_tokens > BLOCK_TOKENS:
        what = f"blocks of 16 tokens instead of {today.block_tokens}"
        large = [one for one in engines if (one.block_tokens or 0) > BLOCK_TOKENS]
        advice = Advice(Setting.BLOCK_TOKENS, what, spell_advice(Setting.BLOCK_TOKENS, large, 16))
        yield Candidate(advice, replace(today, block_tokens=16))


def _memory(today: Today, engines: Sequence[EngineSettingsSeen]) -> Iterator[Candidate]:
    capacity = today.fleet.capacity_tokens
    flags = spell_advice(Setting.MEMORY, engines, lambda engine: more_memory(engine.memory_share))
    advice = Advice(Setting.MEMORY, "a tenth more KV memory", flags)
    yield Candidate(advice, _with(today, capacity_tokens=round(capacity * _MORE_MEMORY)))
    without = [one for one in engines if one.kind is not EngineKind.UNKNOWN and not one.offloads]
    what = f"host memory of {_HOST_MEMORY - 1:.0f} times the KV memory behind it"
    more = _with(today, capacity_tokens=round(capacity * _HOST_MEMORY))
    advice = Advice(Setting.OFFLOAD, what, spell_advice(Setting.OFFLOAD, without))
    yield Candidate(advice, more, at_most="bringing blocks back is not simulated")
