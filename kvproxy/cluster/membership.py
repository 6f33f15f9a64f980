"""The members of a cluster: what the sources say, merged, against the endpoints there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvproxy.cluster.endpoint import Endpoint, origin_of
from kvproxy.config.cluster_schema import EndpointSettings
from kvproxy.types import EndpointId

log = logging.getLogger(__name__)

#: The source whose endpoints come first and win over others of the same id.
STATIC = "static"

#: What an operator added while it runs: comes last, and wins over every other source's endpoint of the same id.
OPERATOR = "operator"

#: An operator's additions held at once in one cluster.
MAX_ADDED = 1024


class Membership:
    """Keeps an endpoint as long as its id and address stay; lets the others finish what they have.

    `make` builds an endpoint, `configure` gives one that stays its settings; `on_left` is told when one is gone for
    good (or another took its id).
    """

    def __init__(
        self,
        make: Callable[[EndpointSettings], Endpoint],
        *,
        configure: Callable[[Endpoint, EndpointSettings], None],
        on_left: Callable[[Endpoint], None],
    ) -> None:
        self._make = make
        self._configure = configure
        self._on_left = on_left
        self._sources: dict[str, tuple[EndpointSettings, ...]] = {STATIC: ()}
        self._weights: dict[EndpointId, float] = {}  # an operator's, over the sources'
        self._removed: frozenset[EndpointId] = frozenset()  # by an operator, whatever the sources say
        self._present: dict[EndpointId, Endpoint] = {}
        #: Its members in the order of the sources, static ones first.
        self.present: tuple[Endpoint, ...] = ()
        self._draining: list[Endpoint] = []  # each with requests in flight

    @property
    def draining(self) -> tuple[Endpoint, ...]:
        """No longer members, still with requests in flight."""
        return tuple(self._draining)

    def get(self, endpoint_id: EndpointId) -> Endpoint | None:
        """The member of this id."""
        return self._present.get(endpoint_id)

    def named_by(self, source: str) -> Sequence[EndpointSettings] | None:
        """What the source knew last; None: it has not said anything yet."""
        return self._sources.get(source)

    def keep_sources(self, names: Collection[str]) -> None:
        """Besides these there are the static endpoints and an operator's; what other sources knew leaves with them."""
        kept = {STATIC, OPERATOR, *names}
        sources = {name: configs for name, configs in self._sources.items() if name in kept}
        if len(sources) < len(self._sources):
            self._apply(sources, self._removed)

    def apply(self, source: str, configs: Iterable[EndpointSettings]) -> None:
        """All that `source` knows now. ValueError for a URL that is none, and then nothing changed."""
        self._apply({**self._sources, source: tuple(configs)}, self._removed)

    def add(self, config: EndpointSettings) -> bool:
        """An operator's endpoint, until it is removed; False if there are too many. ValueError as in `apply`."""
        added = [one for one in self._sources.get(OPERATOR, ()) if one.id != config.id]
        if len(added) >= MAX_ADDED:
            return False
        self._apply({**self._sources, OPERATOR: (*added, config)}, self._removed - {config.id})
        return True

    def remove(self, endpoint_id: EndpointId) -> bool:
        """Take a member out until it is added again, or every source has stopped naming it; whether it was one."""
        if endpoint_id not in self._present:
            return False
        added = tuple(one for one in self._sources.get(OPERATOR, ()) if one.id != endpoint_id)
        self._apply({**self._sources, OPERATOR: added}, self._removed | {endpoint_id})
        return True

    def _apply(self, sources: dict[str, tuple[EndpointSettings, ...]], removed: frozenset[EndpointId]) -> None:
        named, earlier = _merge(sources), _merge(self._sources)
        wanted = {endpoint_id: config for endpoint_id, config in named.items() if endpoint_id not in removed}
        origins = {endpoint_id: origin_of(config) for endpoint_id, config in wanted.items()}
        self._sources = sources
        self._removed = removed & named.keys()
        self._weights = {
            kept: weight
            for kept, weight in self._weights.items()
            if kept in wanted and wanted[kept].weight == earlier[kept].weight
        }

        before = self._present
        stays = {i: e for i, e in before.items() if i in wanted and e.origin == origins[i]}
        for endpoint_id, endpoint in before.items():
            if endpoint_id not in stays:
                self._leave(endpoint, replaced=endpoint_id in wanted)
        self._present = {}
        for endpoint_id, config in wanted.items():
            endpoint = stays.get(endpoint_id) or self._returning(endpoint_id, config) or self._make(config)
            self._configure(endpoint, self._weighted(config))
            self._present[endpoint_id] = endpoint
        self.present = tuple(self._present.values())

    def reweight(self, endpoint_id: EndpointId, weight: float) -> bool:
        """Set an operator's weight until the endpoint leaves or its source gives it another one; whether it is a
        member."""
        endpoint = self._present.get(endpoint_id)
        if endpoint is None:
            return False
        self._weights[endpoint_id] = weight
        self._configure(endpoint, self._weighted(_merge(self._sources)[endpoint_id]))
        return True

    def all_endpoints(self) -> tuple[Endpoint, ...]:
        """Members, and those that only finish what they have."""
        return (*self._present.values(), *self._draining)

    def on_idle(self, endpoint: Endpoint) -> None:
        """A request on a draining endpoint is over."""
        if endpoint.load.in_flight == 0 and endpoint in self._draining:
            self._draining.remove(endpoint)
            self._finalize(endpoint)

    def _weighted(self, config: EndpointSettings) -> EndpointSettings:
        weight = self._weights.get(EndpointId(config.id))
        return config if weight is None else config.model_copy(update={"weight": weight})

    def _returning(self, endpoint_id: EndpointId, config: EndpointSettings) -> Endpoint | None:
        for endpoint in self._draining:
            if endpoint.id == endpoint_id and endpoint.origin == origin_of(config) and not endpoint.metrics.closed:
                self._draining.remove(endpoint)
                endpoint.removed = False
                return endpoint
        return None

    def _leave(self, endpoint: Endpoint, *, replaced: bool) -> None:
        log.info("endpoint %s at %s leaves, %d in flight", endpoint.id, endpoint.origin, endpoint.load.in_flight)
        endpoint.removed = True
        if replaced or endpoint.load.in_flight == 0:
            self._finalize(endpoint)
        if endpoint.load.in_flight:
            self._draining.append(endpoint)

    def _finalize(self, endpoint: Endpoint) -> None:
        if not endpoint.metrics.closed:
            endpoint.metrics.close()
            self._on_left(endpoint)


def _merge(sources: Mapping[str, Sequence[EndpointSettings]]) -> dict[EndpointId, EndpointSettings]:
    merged: dict[EndpointId, EndpointSettings] = {}
    for source in sorted(sources, key=lambda name: (name != STATIC, name)):
        for config in sources[source] if source != OPERATOR else ():
            first = merged.setdefault(EndpointId(config.id), config)
            if first is not config:
                log.warning("endpoint %s of %s is ignored: another source has the same id", config.id, source)
    merged.update((EndpointId(config.id), config) for config in sources.get(OPERATOR, ()))
    return merged
