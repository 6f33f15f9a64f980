"""SGLang's report of itself: `/server_info`, its arguments and the values it derived from them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvproxy.base.errors import BadResponse, NotSupported
from kvproxy.cache.clients.api import Api
from kvproxy.cache.clients.event_sources import MAX_SOURCES, KvEventSource, resolve_address

#: The second is the older name.
INFO_PATHS = ("/server_info", "/get_server_info")
#: Its arguments once, and again for each data-parallel rank, at 12 kB.
_MAX_INFO_BYTES = 4 << 20
#: Speculative decoding by which the radix tree is keyed by pairs of tokens.
_PAIRED = frozenset({"EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"})
_ZMQ = "zmq"


class EventsDescriptor(msgspec.Struct):
    """`kv_events`: where it publishes, rank r at base + r."""

    endpoint_port_base: int
    publisher: str | None = _ZMQ
    replay_endpoint_port_base: int | None = None
    topic: str | None = ""
    dp_size: int = 1


class _EventsConfig(msgspec.Struct):
    """Value of `--kv-events-config`: the only source in versions without a descriptor, and that of the replay address
    in all."""

    publisher: str | None = "null"
    endpoint: str | None = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str | None = ""


class SglangInfo(msgspec.Struct):
    """Fields that are read; None: not reported by this version. (The answer also holds keys, so it is never shown
    whole.)"""

    version: str = ""
    page_size: int | None = None
    dp_size: int = 1
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    mem_fraction_static: float | None = None
    enable_metrics: bool | None = None
    enable_cache_report: bool | None = None
    enable_hierarchical_cache: bool | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    disable_radix_cache: bool | None = None
    speculative_algorithm: str | None = None
    kv_events: EventsDescriptor | None = None
    kv_events_config: str | dict[str, Any] | None = None

    @property
    def pairs(self) -> bool:
        """True if its radix tree is keyed by pairs of tokens."""
        return (self.speculative_algorithm or "").upper() in _PAIRED

    def event_sources(self, *, host: str) -> tuple[KvEventSource, ...]:
        """Return the streams as reached from here: its own host is its view (`*`), so `host` is where its HTTP API
        answers."""
        config = self._events_config()
        told = self.kv_events
        if told is None:
            if config is None:
                return ()
            endpoint = config.endpoint
            ranks = self.dp_size
            topic = config.topic
        else:
            endpoint = f"tcp://*:{told.endpoint_port_base}" if told.publisher == _ZMQ else None
            ranks = told.dp_size
            topic = told.topic
        replay = None if config is None else config.replay_endpoint
        if told is not None and told.replay_endpoint_port_base is not None:
            replay = f"tcp://*:{told.replay_endpoint_port_base}"
        found = []
        for rank in range(min(ranks, MAX_SOURCES + 1)):
            address = resolve_address(endpoint, host=host, offset=rank)
            if address is not None:
                found.append(KvEventSource(rank, address, resolve_address(replay, host=host, offset=rank), topic or ""))
        return tuple(found)

    def _events_config(self) -> _EventsConfig | None:
        """Return what it was started with; None without ZMQ, or where it cannot be read."""
        given = self.kv_events_config
        try:
            config = (
                msgspec.json.decode(given or "{}", type=_EventsConfig)
                if isinstance(given, str | None)
                else msgspec.convert(given, _EventsConfig)
            )
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return config if config.publisher == _ZMQ else None


async def fetch_info(api: Api, *, timeout_s: float) -> SglangInfo:
    """Raise NotSupported where the engine is no SGLang."""
    missing: NotSupported | None = None
    for path in INFO_PATHS:
        try:
            info = await api.get(path, SglangInfo, timeout_s=timeout_s, max_bytes=_MAX_INFO_BYTES)
        except NotSupported as error:
            missing = error
            continue
        if info.page_size is None:  # vLLM has a path of this name too, for developers
            raise NotSupported(f"{path} is not SGLang's", status=404)
        if info.dp_size > MAX_SOURCES or (info.kv_events is not None and info.kv_events.dp_size > MAX_SOURCES):
            raise BadResponse(f"{path}: more than {MAX_SOURCES} data-parallel ranks")
        return info
    assert missing is not None
    raise missing
