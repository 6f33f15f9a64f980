"""Checks of the settings: where replicas cannot meet."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.features.exchange.settings import SyncSettings

_STORES = {"redis": ("redis", "rediss", "unix"), "nats": ("nats", "tls", "ws", "wss")}


def find_faults(sync: SyncSettings) -> Iterator[Finding]:
    """Yield errors and doubts about a section with any setting."""
    given = {name: url for name in _STORES if (url := getattr(sync, name)) is not None}
    if len(given) > 1:
        yield error_at(("sync", "nats"), "replicas meet at one place: redis or nats", "leave one of them out")
    for name, url in given.items():
        scheme, separator, rest = url.get_secret_value().partition("://")
        if not separator or scheme not in _STORES[name] or not rest:
            yield error_at(("sync", name), f"is no {name} URL", f"{_STORES[name][0]}://host:port")
        if importlib.util.find_spec(name) is None:
            yield error_at(("sync", name), f"the library for {name} is not installed", f"pip install 'kvproxy[{name}]'")
    if not given:
        hint = "replicas meet at sync.redis or sync.nats"
        yield warning_at(("sync",), "tells nobody but the workers of this machine, if there are several", hint)
