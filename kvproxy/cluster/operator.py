"""An operator's changes to the members of a cluster while it runs."""

from __future__ import annotations

from kvproxy.base.types import EndpointId
from kvproxy.cluster.membership import OPERATOR, Membership
from kvproxy.cluster.settings import EndpointSettings

MAX_ADDED = 1024  # bound on an operator's endpoints in one cluster


class Operator:
    """Changes by name, where the name of an engine means all of its ranks."""

    def __init__(self, members: Membership) -> None:
        self._members = members

    def add_endpoint(self, config: EndpointSettings) -> bool:
        """Add an endpoint until it is removed; False if there are too many. ValueError as in `apply`."""
        members = self._members
        added = [one for one in members.sources.get(OPERATOR, ()) if one.id != config.id]
        if len(added) >= MAX_ADDED:
            return False
        ranks = {one for one in members.removed if one.startswith(f"{config.id}@")}
        members.apply({**members.sources, OPERATOR: (*added, config)}, members.removed - {config.id} - ranks)
        return True

    def remove_endpoint(self, name: EndpointId) -> bool:
        """Take a member out until it is added again, or every source has stopped naming it; returns False for an
        unknown name."""
        members = self._members
        if not members.find_named(name):
            return False
        added = tuple(one for one in members.sources.get(OPERATOR, ()) if one.id != name)
        members.apply({**members.sources, OPERATOR: added}, members.removed | {name})
        return True

    def drain_endpoint(self, name: EndpointId, *, draining: bool = True) -> bool:
        """Stop (with False, resume) giving a member new requests; returns False for an unknown name."""
        endpoints = self._members.find_named(name)
        for endpoint in endpoints:
            endpoint.draining = draining
        return bool(endpoints)

    def reweight_endpoint(self, name: EndpointId, weight: float) -> bool:
        """Give a member a weight until it leaves or its source gives it another one; returns False for an unknown
        name."""
        endpoints = self._members.find_named(name)
        for endpoint in endpoints:
            self._members.reweight(endpoint, weight)
        return bool(endpoints)
