"""Members of a cluster: merges the sources' answers and updates the endpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvproxy.base.types import EndpointId
from kvproxy.base.upstream.origin import Origin
from kvproxy.cluster.departures import Departures
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine, origin_of
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings

log = logging.getLogger(__name__)

#: The source whose endpoints come first and win over others of the same id.
STATIC = "static"
#: Endpoints an operator added at run time: the last source, which wins over others of the same id.
OPERATOR = "operator"
#: Settings of a cluster that engines and endpoints use; if none changed, thousands of endpoints are left alone.
CONFIGURED_BY = "health", "breaker", "data_parallel", "max_in_flight", "engine_priority", "engine_priority_order"


class Owner(Protocol):
    """The cluster, as its membership sees it."""

    @property
    def settings(self) -> ClusterSettings: ...
    def make_engine(self, config: EndpointSettings) -> Engine: ...
    def make_endpoint(self, config: EndpointSettings, engine: Engine, rank: int | None) -> Endpoint: ...
    def endpoint_left(self, endpoint: Endpoint) -> None: ...  # for good, or because another one took its id
    def members_changed(self) -> None: ...


class _Member(NamedTuple):
    """An endpoint that is to be there."""

    config: EndpointSettings  # settings of its engine
    engine: Engine
    rank: int | None


class Membership:
    """Keeps an endpoint as long as its id and address stay; lets the others finish what they have. An engine whose
    data-parallel ranks are known has an endpoint for each of them, every other engine has one."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        #: Their answers.
        self.sources: Mapping[str, tuple[EndpointSettings, ...]] = {STATIC: ()}
        self._weights: dict[EndpointId, float] = {}  # set by an operator, over those of the sources
        #: Members or engines that an operator removed, whatever the sources list.
        self.removed: frozenset[EndpointId] = frozenset()
        self._engines: dict[EndpointId, Engine] = {}
        self._named: dict[EndpointId, EndpointSettings] = {}  # settings of the engines
        self._settings: ClusterSettings | None = None  # likewise
        self._wanted: Mapping[EndpointId, _Member] = {}  # the members
        self._present: dict[EndpointId, Endpoint] = {}
        #: Its members in the order of the sources, static ones first.
        self.present: tuple[Endpoint, ...] = ()
        #: Their engines.
        self.engines: tuple[Engine, ...] = ()
        self.departures = Departures(on_gone=owner.endpoint_left)

    def find_endpoint(self, endpoint_id: EndpointId) -> Endpoint | None:
        """Return the member of this id."""
        return self._present.get(endpoint_id)

    def find_named(self, name: EndpointId) -> Sequence[Endpoint]:
        """Return the member of this id, or those of the engine of this id; () for none."""
        if (endpoint := self._present.get(name)) is not None:
            return (endpoint,)
        engine = self._engines.get(name)
        return () if engine is None else self.of_engine(engine)

    def of_engine(self, engine: Engine) -> Sequence[Endpoint]:
        """Return the members that are the engine, or its ranks; () when it left, as the end of a request may
        find it."""
        present = (self._present.get(member) for member in engine.members)
        return tuple(endpoint for endpoint in present if endpoint is not None and endpoint.engine is engine)

    def named_by(self, source: str) -> Sequence[EndpointSettings] | None:
        """Return the source's last answer; None before the first."""
        return self.sources.get(source)

    def keep_sources(self, names: Collection[str]) -> None:
        """Besides these there are the static endpoints and an operator's; what other sources knew leaves with them."""
        kept = {STATIC, OPERATOR, *names}
        sources = {name: configs for name, configs in self.sources.items() if name in kept}
        if len(sources) < len(self.sources):
            self.apply(sources, self.removed)

    def apply_source(self, source: str, configs: Iterable[EndpointSettings]) -> None:
        """Apply the complete answer of `source`. ValueError for an invalid URL; nothing changed then."""
        self.apply({**self.sources, source: tuple(configs)}, self.removed)

    def apply(self, sources: Mapping[str, tuple[EndpointSettings, ...]], removed: frozenset[EndpointId]) -> None:
        """Apply the sources' answers without what an operator removed. ValueError for an invalid URL; nothing changed
        then."""
        named = _merge(sources)
        settings = self._owner.settings
        before = self._named
        last = self._settings
        afresh = last is None or any(getattr(settings, one) != getattr(last, one) for one in CONFIGURED_BY)
        changed = {one: c for one, c in named.items() if before.get(one) is not c or one not in self._engines}
        origins = {one: origin_of(config) for one, config in changed.items()}  # before any change
        engines = {one: self._engines[one] for one in named if one not in changed}
        engines.update((one, self._engine_at(config, origins[one])) for one, config in changed.items())
        for one in named if afresh else changed:
            engines[one].configure(named[one], settings)
        self._named = named
        self._settings = settings
        members = _members(named, engines, self._wanted)
        wanted = members
        if removed:
            wanted = {one: m for one, m in members.items() if not removed & {one, m.engine.id}}
        self.sources = sources
        self.removed = removed & (named.keys() | members.keys()) if removed else removed
        self._weights = self._kept_weights(wanted)
        others = [one for one, member in wanted.items() if self._wanted.get(one) is not member]
        stays = {one for one in others if one in self._present and self._present[one].engine is wanted[one].engine}
        leave = [one for one in self._present if one not in wanted]
        leave += [one for one in others if one in self._present and one not in stays]
        moved = {wanted[one].engine for one in others} | {self._present[one].engine for one in leave}
        for one in leave:
            self.departures.begin(self._present[one], replaced=one in wanted)
        self._wanted = wanted
        found = {one: self._present[one] if one in stays else self._enter(one, wanted[one]) for one in others}
        present = self._present
        self._present = {one: found[one] if one in found else present[one] for one in wanted}
        for one in wanted if afresh else others:
            self._present[one].configure(self._weighted(one), settings)
        for engine in moved:
            ids = map(engine.endpoint_id, engine.ranks.candidates or (None,))
            engine.members = tuple(one for one in ids if one in wanted and wanted[one].engine is engine)
        self._engines = {one: engine for one in named if (engine := engines[one]).members}
        self.present = tuple(self._present.values())
        self.engines = tuple(self._engines.values())
        self._owner.members_changed()

    def all_endpoints(self) -> tuple[Endpoint, ...]:
        """Return the members, and endpoints that only finish their requests."""
        return (*self.present, *self.departures.endpoints)

    def reweight(self, endpoint: Endpoint, weight: float) -> None:
        """Set an operator's weight, until the endpoint leaves or its source gives it another one."""
        self._weights[endpoint.id] = weight
        endpoint.configure(self._weighted(endpoint.id), self._owner.settings)

    def _weighted(self, endpoint_id: EndpointId) -> EndpointSettings:
        config = self._wanted[endpoint_id].config
        weight = self._weights.get(endpoint_id)
        return config if weight is None else config.model_copy(update={"weight": weight})

    def _enter(self, endpoint_id: EndpointId, member: _Member) -> Endpoint:
        """Return the endpoint that comes back, or a new one, drained if an operator drained all that its engine had
        before."""
        if (returning := self.departures.take_back(endpoint_id, member.engine)) is not None:
            return returning
        endpoint = self._owner.make_endpoint(*member)
        formerly = [self._present[one] for one in self._formerly(member)]
        endpoint.draining = bool(formerly) and all(one.draining for one in formerly)
        return endpoint

    def _formerly(self, member: _Member) -> list[EndpointId]:
        """Return what its engine had before its ranks were known, or known to be others."""
        return [one for one in member.engine.members if one in self._present]

    def _kept_weights(self, wanted: Mapping[EndpointId, _Member]) -> dict[EndpointId, float]:
        """Return an operator's, each until its source names another one; they go over to ranks that were not known
        before."""
        kept = {}
        before = self._wanted
        for endpoint_id, member in wanted.items() if self._weights else ():
            for one in [endpoint_id] if endpoint_id in before else self._formerly(member):
                if one in self._weights and before[one].config.weight == member.config.weight:
                    kept[endpoint_id] = self._weights[one]
        return kept

    def _engine_at(self, config: EndpointSettings, origin: Origin) -> Engine:
        """Return the engine there is at this address, or another one."""
        present = self._engines.get(EndpointId(config.id))
        if present is not None and present.origin == origin:
            return present
        return self.departures.find_engine(config.id, origin) or self._owner.make_engine(config)


def _merge(sources: Mapping[str, Sequence[EndpointSettings]]) -> dict[EndpointId, EndpointSettings]:
    merged: dict[EndpointId, EndpointSettings] = {}
    listed = [configs for configs in sources.values() if configs]
    if len(listed) == 1:
        merged = {EndpointId(config.id): config for config in listed[0]}
        if len(merged) == len(listed[0]):
            return merged
        merged = {}
    for source in sorted(sources, key=lambda name: (name != STATIC, name)):
        for config in sources[source] if source != OPERATOR else ():
            first = merged.setdefault(EndpointId(config.id), config)
            if first is not config:
                log.warning("endpoint %s of %s is ignored: another source has the same id", config.id, source)
    merged.update((EndpointId(config.id), config) for config in sources.get(OPERATOR, ()))
    return merged


def _members(
    named: Mapping[EndpointId, EndpointSettings],
    engines: Mapping[EndpointId, Engine],
    before: Mapping[EndpointId, _Member],
) -> dict[EndpointId, _Member]:
    members: dict[EndpointId, _Member] = {}
    for name, config in named.items():
        engine = engines[name]
        known = before.get(name)
        if known is not None and known[0] is config and known[1] is engine and not engine.ranks.candidates:
            members[name] = known
            continue
        for rank in engine.ranks.candidates or (None,):
            endpoint_id = engine.endpoint_id(rank)
            if rank is not None and (endpoint_id in named or endpoint_id in members):
                log.warning("rank %d of %s is ignored: another endpoint has its id %s", rank, name, endpoint_id)
            else:
                known = before.get(endpoint_id)
                member = _Member(config, engine, rank)
                members[endpoint_id] = known if known is not None and known == member else member
    return members
