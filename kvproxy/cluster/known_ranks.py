"""What becomes known of engines' data-parallel ranks while the proxy runs, and what follows for a cluster's members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.membership import Membership
from kvproxy.cluster.ranks import RankRefusal

log = logging.getLogger(__name__)


class KnownRanks:
    """Of one cluster's engines. `on_change` is called after the members have changed by it."""

    def __init__(self, cluster: str, members: Membership, *, on_change: Callable[[], None]) -> None:
        self._cluster = cluster
        self._members = members
        self._on_change = on_change

    def observe(
        self, engine: Engine, shown: Collection[int], named: Collection[int] | None, *, in_body: bool = False
    ) -> None:
        """The ranks that an engine's metrics show now, and those that its event sources name (None: they were not
        asked); whether it reads them in a body. Once they are known each is an endpoint."""
        before = engine.ranks.candidates
        engine.ranks.in_body = in_body
        engine.ranks.observe(shown, named)
        self._follow(engine, before)

    def resume(self, engine: Engine, found: Collection[int]) -> None:
        """An engine had these when an earlier life of this proxy saw it last."""
        before = engine.ranks.candidates
        engine.ranks.resume(found)
        self._follow(engine, before)

    def refused(self, endpoint: Endpoint, number: int, *, named: bool = True) -> None:
        """An engine served a request without a rank that it had refused with this one; `named`: for the rank's sake, by
        its own word."""
        engine, rank = endpoint.engine, endpoint.rank
        assert rank is not None
        where = f"{self._cluster}/{engine.id}"
        before = engine.ranks.candidates
        refusal = engine.ranks.refuse(rank, number, named=named)
        endpoint.metrics.rank_refused(refusal.value)
        if refusal is RankRefusal.RENUMBERED:
            log.info(
                "%s counts its ranks from its own first: %d is asked for as %d", where, rank, engine.ranks.number(rank)
            )
        elif refusal is RankRefusal.DROPPED:
            log.warning("%s has no data-parallel rank %d: it is no candidate any more", where, rank)
        self._follow(engine, before)

    def restarted(self, engine: Engine) -> None:
        """It is another process than before, which has refused nothing yet."""
        before = engine.ranks.candidates
        engine.ranks.restarted()
        self._follow(engine, before)

    def _follow(self, engine: Engine, before: Collection[int]) -> None:
        if engine.ranks.candidates != before and engine in self._members.engines:
            ranks = ", ".join(map(str, engine.ranks.candidates)) or "none"
            log.info("%s/%s: data-parallel ranks that are candidates: %s", self._cluster, engine.id, ranks)
            self._members.refresh()
            self._on_change()
