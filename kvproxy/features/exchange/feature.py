"""The feature, as the core meets it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Duration, Model, Name, Secret
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature, StatusPart

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.companion import Companion, Siblings
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.runtime.operated import AdminTarget, OperatorFinding


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


def find_faults(sync: SyncSettings) -> Iterator[Finding]:
    """Yield errors and doubts about a section with any setting."""
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


class Exchange(Feature):
    """Has several processes decide as one."""

    name = "exchange"
    metric_group = "SyncMetrics"
    panel = "peers"
    settings = {Config: (SyncPlace,)}
    read_at_start = ("sync",)

    def verify(self, config: Config) -> Iterable[Finding]:
        """Refuse places where replicas cannot meet."""
        settings = part_of(config, SyncPlace).sync
        return () if settings == SyncSettings() else find_faults(settings)

    def accompany(self, proxy: AdminTarget, config: Config, *, siblings: Siblings | None) -> Companion | None:
        """Return the service, where there are others to share with."""
        settings = part_of(config, SyncPlace).sync
        if siblings is None and settings.redis is None and settings.nats is None and settings.ray is None:
            return None
        from kvproxy.features.exchange.service import SyncService

        return SyncService(
            config,
            siblings=siblings,
            metrics=proxy.metrics,
            clock=proxy.clock,
            wall_clock=lambda: proxy.wall_clock().timestamp(),
        )

    def find_troubles(self, operated: AdminTarget) -> Iterable[OperatorFinding]:
        """Return what stands between this process and the others."""
        from kvproxy.features.exchange.operated import find_troubles

        return find_troubles(operated)

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/sync`."""
        from kvproxy.features.exchange.operated import list_routes

        return list_routes(operated)

    def describe_live(self, operated: AdminTarget) -> Mapping[str, object]:
        """Return how it stands with the others; None: this process decides alone."""
        from kvproxy.features.exchange.operated import find_service

        service = find_service(operated)
        return {"sync": None if service is None else service.describe_state()}

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """Return rules that merge the workers' data on other processes into one account."""
        from kvproxy.features.exchange.operated import MERGED
        from kvproxy.operate.merge import fields

        return {"/live": {"sync": fields(MERGED)}, "/sync": MERGED}

    def show_status(self, live: Mapping[str, Any], *, colour: bool) -> StatusPart:
        """Return a sentence and a table of the others."""
        from kvproxy.features.exchange.operated import show_peers

        return show_peers(live, colour=colour)


FEATURE = Exchange()
