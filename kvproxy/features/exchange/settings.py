"""Settings of the exchange with other processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model, Name, Secret
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.operate.config.schema import Config


class SyncSettings(Model):
    """Other kvproxy processes that decide as one with this one: what is routed, learned and spent in one is known in
    all. Workers of one machine find each other by themselves; replicas meet at one of these."""

    redis: Secret | None = None
    """URL of a Redis or Valkey, such as `redis://:PASSWORD@host:6379/0` (`pip install 'kvproxy[redis]'`)."""
    nats: Secret | None = None
    """URL of a NATS server, such as `nats://USER:PASSWORD@host:4222` (`pip install 'kvproxy[nats]'`)."""
    ray: Name | None = None
    """Name of an actor of the Ray cluster that the processes are part of (`pip install 'kvproxy[ray]'`); it is made
    where there is none. The router for Ray Serve sets it; no process joins Ray for it."""
    name: Name = "default"
    """Replicas with the same name decide as one: they have the same configuration."""
    replica: str = Field(default="", max_length=128)
    """Name of this replica, different in each; empty: host name and port."""
    interval: Duration = Field(default=0.005, ge=0.001, le=1)
    """Interval of batches to the others."""
    heartbeat: Duration = Field(default=0.5, ge=0.05, le=60)
    """How often each says that it is there; after three it did not say so, its load no longer counts."""


class SyncPlace(Model):
    """The section that a configuration gets."""

    sync: SyncSettings = SyncSettings()
    """Other replicas that decide as one with this one."""


_STORES = {"redis": ("redis", "rediss", "unix"), "nats": ("nats", "tls", "ws", "wss")}


def verify(config: Config) -> Iterator[Finding]:
    """Refuse places where replicas cannot meet."""
    sync = part_of(config, SyncPlace).sync
    if sync == SyncSettings():
        return
    given = [name for name in (*_STORES, "ray") if getattr(sync, name) is not None]
    if len(given) > 1:
        yield error_at(("sync", given[1]), "replicas meet at one place: redis, nats or ray", "leave one of them out")
    for name in given:
        if (schemes := _STORES.get(name)) is not None:
            scheme, separator, rest = getattr(sync, name).get_secret_value().partition("://")
            if not separator or scheme not in schemes or not rest:
                yield error_at(("sync", name), f"is no {name} URL", f"{schemes[0]}://host:port")
        if importlib.util.find_spec(name) is None:
            yield error_at(("sync", name), f"the library for {name} is not installed", f"pip install 'kvproxy[{name}]'")
    if not given:
        hint = "replicas meet at sync.redis or sync.nats"
        yield warning_at(("sync",), "tells nobody but the workers of this machine, if there are several", hint)


SETTINGS = FeatureSettings(fields={Config: (SyncPlace,)}, read_at_start=("sync",), verify=verify)
