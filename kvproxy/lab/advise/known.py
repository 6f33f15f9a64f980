"""Advice that needs no simulation: what the engines report of themselves and what the receipts show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvproxy.base.installed import installed
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.feature import find_reports
from kvproxy.cache.settings import KvCacheSettings, has_store
from kvproxy.lab.advise.advice import Advice
from kvproxy.lab.advise.engines import EngineSettingsSeen
from kvproxy.lab.advise.traffic import NOT_MEASURED, Occupancy, Traffic
from kvproxy.operate.doctor.flags import Setting, spell_flag
from kvproxy.operate.feature import Feature

#: Answers with predicted hits but no figure that are significant, and the hits among them.
_ANSWERS = 20
_HITS = 5
_HIT_TOKENS = 256
#: Where requests wait for each other so much of the time, their order matters.
_MUCH_WAITING = 0.2
#: Share of requests that lost their KV memory to others.
_MANY_PREEMPTIONS = 0.01
#: vLLM's defaults, by GPU memory.
DEFAULT_SEQUENCES = (256, 1024)


@dataclass(frozen=True, slots=True)
class KnownFacts:
    """Facts known without a simulation. `kvcache` is None without that filter; `ordered`: kvproxy sends engines a
    priority."""

    engines: Sequence[EngineSettingsSeen]
    traffic: Traffic | None = None
    occupancy: Occupancy = NOT_MEASURED
    kvcache: KvCacheSettings | None = None
    ordered: bool = False


def advise_from_facts(known: KnownFacts) -> list[Advice]:
    """Return what would help for certain, the most important first."""
    return [
        one
        for find in (_caching, _report, _events, _render, _slots, _preemptions, _priority, _of_features)
        for one in find(known)
    ]


def spell_advice(
    setting: Setting, engines: Sequence[EngineSettingsSeen], value: Callable[[EngineSettingsSeen], object] | object = ""
) -> tuple[tuple[str, str], ...]:
    """Return the flag for these engines, once for those that spell it alike; engines without such a flag are
    left out."""
    found: dict[str, list[str]] = {}
    for engine in engines:
        flag = spell_flag(setting, engine.kind, value(engine) if callable(value) else value)
        if flag:
            found.setdefault(flag, []).append(engine.id)
    return tuple((name_engines(ids), flag) for flag, ids in found.items())


def name_engines(ids: Sequence[str]) -> str:
    """For people."""
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    return f"endpoint{'s' if len(ids) > 1 else ''} {shown}"


def _advice(
    setting: Setting, engines: Sequence[EngineSettingsSeen], what: str, *, value: object = "", config: str = ""
) -> Iterator[Advice]:
    """Nothing, where no engine has such a flag."""
    flags = spell_advice(setting, engines, value)
    if flags:
        yield Advice(setting, what, flags, config)


def _caching(known: KnownFacts) -> Iterator[Advice]:
    off = [one for one in known.engines if one.prefix_caching is False]
    yield from _advice(
        Setting.PREFIX_CACHING, off, "prefix caching is off: every prompt is computed from its beginning"
    )


def _report(known: KnownFacts) -> Iterator[Advice]:
    silent = [one for one in known.engines if one.cache_report is False or _never_reported(known.traffic, one.id)]
    what = "answers do not report cached tokens: predictions cannot be checked, capacity is not learned"
    yield from _advice(Setting.CACHE_REPORT, silent, what)


def _never_reported(traffic: Traffic | None, endpoint: EndpointId) -> bool:
    """Return True if an endpoint never reports cached tokens. Some versions omit the figure if it is 0, so only answers
    with predicted hits count."""
    own = [] if traffic is None else traffic.answered_by(endpoint)
    expected = sum(one.predicted_tokens >= _HIT_TOKENS for one in own)
    return len(own) >= _ANSWERS and expected >= _HITS and all(one.cached_tokens is None for one in own)


def _events(known: KnownFacts) -> Iterator[Advice]:
    if known.kvcache is None or len(known.engines) < 2:
        return  # nothing makes use of them
    silent = [one for one in known.engines if one.publishes is False]
    follow = "" if find_reports(known.kvcache) is not None else "kv_events: true    (filter kvcache)"
    what = "no KV events: cache contents are estimated from routed requests, evictions are not seen"
    yield from _advice(Setting.KV_EVENTS, silent, what, config=follow)
    unfollowed = [one for one in known.engines if one.publishes]
    if follow and unfollowed:
        yield Advice(
            Setting.KV_EVENTS,
            f"{name_engines([e.id for e in unfollowed])}: publishes KV events that kvproxy does not follow",
            config=follow,
        )
    without = [one for one in known.engines if one.publishes and one.replays is False]
    what = "KV events without a replay endpoint: after a gap the index of an engine starts anew"
    yield from _advice(Setting.REPLAY, without, what)


def _render(known: KnownFacts) -> Iterator[Advice]:
    needed = known.kvcache is not None and (has_store(known.kvcache) or find_reports(known.kvcache) is not None)
    if needed and known.traffic is not None and any(one.chat for one in known.traffic.requests):
        refusing = [one for one in known.engines if one.kind is EngineKind.VLLM and one.renders is False]
        what = (
            "chats are tokenized by /tokenize, which lacks reasoning_effort, documents and tool_choice; with "
            "/render their tokens are exact, and KV events match"
        )
        yield from _advice(Setting.RENDER, refusing, what)


def _slots(known: KnownFacts) -> Iterator[Advice]:
    occupancy = known.occupancy
    capacity = usual_capacity(known.engines)
    slots = occupancy.find_slots(capacity)
    if slots is not None and slots < DEFAULT_SEQUENCES[-1]:
        held = f", with {occupancy.held_tokens / capacity:.0%} of the KV memory in use" if capacity else ""
        what = (
            f"engines never answer more than {slots} requests at a time, while others wait for a slot "
            f"({occupancy.waiting_share:.0%} of the time{held})"
        )
        yield from _advice(Setting.SEQUENCES, known.engines, what, value=more_sequences(slots))


def usual_capacity(engines: Sequence[EngineSettingsSeen]) -> int | None:
    """Return the median KV memory of the engines in tokens; None if none reports it."""
    capacity = [one.capacity_tokens for one in engines if one.capacity_tokens]
    return round(median(capacity)) if capacity else None


def more_sequences(slots: int) -> int:
    """vLLM's next default above."""
    return next((one for one in DEFAULT_SEQUENCES if one > slots), 2 * slots)


def _preemptions(known: KnownFacts) -> Iterator[Advice]:
    for engine in known.engines:
        requests = engine.metrics.prefills
        if not engine.preemptions or not requests or engine.preemptions < _MANY_PREEMPTIONS * requests:
            continue
        what = f"{engine.preemptions / requests:.0%} of its requests lost their KV memory to others and began again"
        yield from _advice(Setting.MEMORY, [engine], what, value=more_memory(engine.memory_share))


def more_memory(share: float | None) -> str:
    """Return a little more of the GPU's memory; what is beyond 0.95 is wanted by other things."""
    return "0.95" if share is None or share < 0.95 else f"{min(0.98, share + 0.02):.2g}"


def _priority(known: KnownFacts) -> Iterator[Advice]:
    if known.ordered:
        refusing = [one for one in known.engines if one.by_priority is False]
        yield from _advice(Setting.SCHEDULING, refusing, "kvproxy sends a priority that the engine does not order by")


def _of_features(known: KnownFacts) -> Iterator[Advice]:
    """Of what features find, all is about memory."""
    memory = [one.capacity_tokens for one in known.engines if one.capacity_tokens]
    receipts = () if known.traffic is None else known.traffic.receipts
    for feature in installed(Feature):
        yield from (Advice(Setting.MEMORY, what) for what in feature.advise(receipts, memory))


def much_waits(known: KnownFacts) -> Iterator[Advice]:
    """Advise priority scheduling if requests wait for each other in order of arrival, which no simulation can judge."""
    if known.occupancy.find_slots(usual_capacity(known.engines)) is not None:
        return  # then it is slots that are wanting
    waiting = {one.endpoint: one for one in known.occupancy.engines if one.waiting_share >= _MUCH_WAITING}
    engines = [one for one in known.engines if one.id in waiting and not one.by_priority]
    if engines and not known.ordered:
        shares = [waiting[one.id].waiting_share for one in engines]
        what = f"requests wait for each other {min(shares):.0%} to {max(shares):.0%} of the time, in order of arrival"
        yield from _advice(Setting.SCHEDULING, engines, what, config=order_config(engines))


def order_config(engines: Sequence[EngineSettingsSeen]) -> str:
    """kvproxy's side of scheduling by priority."""
    highest = all(one.kind is EngineKind.SGLANG for one in engines) and bool(engines)
    return f"engine_priority: on{', engine_priority_order: highest_first' if highest else ''}    (the cluster)"
