"""Addresses of an engine's KV events, from `/kv_event_sources` or the configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvproxy.cluster.settings import EventSources

#: Streams of one engine, one a data-parallel rank; each is a socket of ours.
MAX_SOURCES = 256

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """One stream: one engine, one data-parallel rank."""

    dp_rank: int
    endpoint: str  # ZMQ address to subscribe to
    replay_endpoint: str | None = None
    topic: str = ""


class _Entry(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    data_parallel_rank: int | None = None


#: 0.32 answers an object keyed by rank, later versions an array whose entries name their rank.
WireSources = dict[str, _Entry] | list[_Entry]


def sources_from_wire(answer: WireSources, *, host: str) -> tuple[KvEventSource, ...]:
    """Return the streams in a decoded `/kv_event_sources` answer, as reached from here; switched-off ones are left out.

    The endpoint's own host is the engine's view (`*`, `[::]`, ...): only the port after the last colon is taken,
    the host is the one its HTTP API answers on. Ranks that show the same address publish on port + rank.
    """
    entries = _by_rank(answer)
    shared = len({entry.endpoint for entry in entries.values()}) < len(entries)
    sources = []
    for rank, entry in sorted(entries.items()):
        offset = rank if shared else 0
        endpoint = resolve_address(entry.endpoint, host=host, offset=offset)
        if endpoint is not None:
            replay = resolve_address(entry.replay_endpoint, host=host, offset=offset)
            sources.append(KvEventSource(rank, endpoint, replay, entry.topic or ""))
    return tuple(sources)


def stated_sources(stated: EventSources, *, host: str, rank: int | None = None) -> tuple[KvEventSource, ...]:
    """Return the streams of an engine that does not report them, from its start options; () if these are unknown. With
    `rank` that of one data-parallel rank.

    vLLM publishes each rank one port above the one before."""
    found = []
    for each in range(stated.data_parallel_size) if rank is None else (rank,):
        address = resolve_address(stated.endpoint, host=host, offset=each)
        if address is not None:
            found.append(KvEventSource(each, address, resolve_address(stated.replay_endpoint, host=host, offset=each)))
    return tuple(found)


def resolve_address(address: str | None, *, host: str, offset: int = 0) -> str | None:
    """Return a ZMQ address as `host` offers it (`tcp://host:port`; `ipc://` unchanged); None when there is none."""
    if not address:
        return None
    if address.startswith("ipc://"):
        return address
    scheme, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    if scheme != "tcp" or not port.isdigit() or not 0 < int(port) + offset <= _MAX_PORT:
        return None
    literal = f"[{host}]" if ":" in host else host
    return f"tcp://{literal}:{int(port) + offset}"


def _by_rank(answer: WireSources) -> dict[int, _Entry]:
    if isinstance(answer, dict):
        ranked = [(int(key) if key.isdigit() else 0, entry) for key, entry in answer.items()]
    else:
        ranked = [
            (index if entry.data_parallel_rank is None else entry.data_parallel_rank, entry)
            for index, entry in enumerate(answer)
        ]
    return {rank: entry for rank, entry in ranked if entry.enable_kv_cache_events and entry.publisher == "zmq"}
