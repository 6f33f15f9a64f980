"""What an operator should know of the engines as sources of facts: their streams of KV events, and caches that were
lost."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.admin.trouble import DOWN, NAMED, Rank, Trouble, list_names, source_trouble
from kvproxy.clients.kv_events.status import StreamState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.kvcache.feedback.cache_losses import CacheLosses, LossReason
from kvproxy.kvcache.feedback.trust import WINDOW, MissedReuse
from kvproxy.kvcache.overlap.kv_event_streams import EventStreams
from kvproxy.kvcache.service import KvCache

#: A loss of a cache explains what follows for so long.
_LOSS_SHOWN_S = 600.0
_LOST = {
    LossReason.RESTARTED: "restarted",
    LossReason.CLEARED: "dropped its cache (its KV events say so)",
    LossReason.FORGOT: "lost its cache (it reused nothing of what it was sent just then)",
    LossReason.ASLEEP: "gave its cache up when it was put to sleep",
}
#: Streams of KV events connect, and fall behind, for a moment in all innocence.
_STREAM_PATIENCE_S = 10.0


def find_engine_troubles(kvcache: KvCache, name: str, cluster: Cluster, now: float) -> Iterator[Trouble]:
    """Of one cluster."""
    yield from _streams(kvcache.overlap.streams, name, cluster, now)
    yield from _asleep(name, cluster, now)
    for one in kvcache.overlap.indexes[name].missed.raised():
        yield _disbelieved(name, one)
    yield from _lost(kvcache.state.losses, name, cluster)


def _streams(streams: EventStreams | None, name: str, cluster: Cluster, now: float) -> Iterator[Trouble]:
    if streams is None:
        return
    broken: list[tuple[Endpoint, str]] = []
    for one in cluster.endpoints:
        if one.condition(now) not in DOWN:
            states = streams.streams(one).values()
            reasons = [each.reason.value for each in states if each.state is not StreamState.EXACT]
            broken += [(one, reasons[0].replace("_", " "))] if reasons else []
    effect = "what it holds is known only by what was routed there"
    fix = "is its events port open? `kvproxy doctor` listens to it"
    for one, reason in broken if len(broken) <= NAMED else ():
        key, where = ("stream", name, str(one.id)), f"{name}/{one.id}"
        yield source_trouble(key, where, f"KV events: {reason}; {effect}", fix, patience_s=_STREAM_PATIENCE_S)
    if len(broken) > NAMED:
        silent = list_names([one for one, _ in broken])
        what = f"KV events of {len(broken)} endpoints ({silent}): {broken[0][1]}; {effect}"
        yield source_trouble(("stream", name), name, what, fix, patience_s=_STREAM_PATIENCE_S)


def _asleep(name: str, cluster: Cluster, now: float) -> Iterator[Trouble]:
    sleeping = [one for one in cluster.endpoints if one.condition(now) is Condition.ASLEEP]
    if sleeping:
        verb, whose = ("sleeps", "its") if len(sleeping) == 1 else ("sleep", "their")
        what = f"{list_names(sleeping)} {verb}, as {whose} own metrics say: left out"
        fix = "wake it (`POST /wake_up`), or take it out of the configuration"
        yield source_trouble(("asleep", name), name, what, fix)


def _disbelieved(name: str, one: MissedReuse) -> Trouble:
    what = (
        f"its KV events announce less than it reuses ({one.announced_tokens:,} of {one.reused_tokens:,} tokens; "
        f"{one.count} of the last {WINDOW}): what was routed there counts instead"
    )
    fix = "it may name blocks in a way that is not understood, or see other prompts: `kvproxy doctor` listens to it"
    return source_trouble(("missed", name, str(one.endpoint)), f"{name}/{one.endpoint}", what, fix)


def _lost(losses: CacheLosses, name: str, cluster: Cluster) -> Iterator[Trouble]:
    for endpoint in cluster.endpoints:
        loss = losses.latest(name, endpoint.id)
        if loss is not None and loss.age_s <= _LOSS_SHOWN_S and not endpoint.asleep:
            where = f"{name}/{endpoint.id}"
            yield Trouble(("loss", name, str(endpoint.id)), Rank.REST, "note", where, _LOST[loss.reason])
