"""Verdicts on a cluster's engines from probes and attempts: which are out, and whether they are to blame if all are."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvproxy.base.resilience.breaker import BreakerState
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.endpoint import DOWN, TAKING, Condition, Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.membership import Membership
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.prober import ProbeOutcome, TellProbe
from kvproxy.cluster.screening import Screening, may_eject
from kvproxy.cluster.settings import HealthCheckSettings

log = logging.getLogger(__name__)

#: Attempts in a row without a response, at least one on every engine, that make an outage. One request makes three.
_OUTAGE_ATTEMPTS = 4
#: Time for which a failure seen by requests on several engines is held against none.
_SHARED_FAILURE_S = 10.0


class Verdicts:
    """Of one cluster's engines; the data-parallel ranks of one are well or not well together. `on_return` is called
    with an engine that is healthy again."""

    def __init__(
        self,
        cluster: str,
        settings: HealthCheckSettings,
        *,
        members: Membership,
        screening: Screening,
        clock: Clock,
        on_return: Callable[[Engine], None],
    ) -> None:
        self._cluster = cluster
        self.settings = settings
        self._members = members
        self._screening = screening
        self._clock = clock
        self._on_return = on_return
        self.send_probe: TellProbe | None = None
        self._shared_failures: dict[str, float] = {}  # time of the last request that failed alike on several engines
        self._all_down = False

    def record_outcome(self, engine: Engine, outcome: AttemptOutcome, now: float) -> None:
        """Draw the conclusions of an attempt that was no success."""
        if outcome is AttemptOutcome.FAILURE:
            if engine.health.record_failure(now) and may_eject(self._members.engines, self.settings, now):
                self._eject(engine, now)
        elif outcome is AttemptOutcome.CLIENT_ERROR:
            engine.health.record_success()

    def has_outage(self, model: str, now: float) -> bool:
        """Return True if every endpoint of `model` is out or has recently served nothing: a retry would only add
        load."""
        pool = self._screening.find_pool(model, now)
        if pool.panic or not pool.usable:
            return pool.panic
        unserved = [health.unserved_in_a_row(now) for health in {endpoint.health for endpoint in pool.usable}]
        return all(unserved) and sum(unserved) >= _OUTAGE_ATTEMPTS

    def is_spared(self, endpoint: Endpoint, model: str, *, reason: str, client: str, now: float) -> bool:
        """Return True if a failure on `endpoint` alone may be the request's fault: a plain 500 that only one client's
        requests get, no other engine does better at present, or requests that fail in this way wherever they go
        (`record_shared_failure`) have been seen lately. `client`: a name or address; "" if several share it."""
        if reason == "status_500" and client and endpoint.health.fails_only_for(client):
            return True
        if now - self._shared_failures.get(reason, -math.inf) < _SHARED_FAILURE_S:
            return True
        usable = self._screening.find_pool(model, now).usable
        others = [other for other in usable if other.engine is not endpoint.engine]
        return bool(others) and all(other.health.unserved_in_a_row(now) for other in others)

    def record_shared_failure(self, reason: str, now: float) -> None:
        """Record a request that failed in the same way on several engines and was served by none."""
        self._shared_failures[reason] = now

    def breaker_changed(self, engine: Engine) -> None:
        """React to a change of an engine's breaker."""
        if engine.breaker.state is BreakerState.OPEN:
            self._count_ejection(engine, Condition.BREAKER_OPEN.value)
        self._screening.invalidate(*self._members.of_engine(engine))
        self.follow_outage(self._clock())

    def record_probe(self, engine: Engine, outcome: ProbeOutcome) -> None:
        for endpoint in self._members.of_engine(engine):
            endpoint.metrics.count_probe(outcome.value)
        if outcome.says_nothing:
            return
        if self.send_probe is not None:
            self.send_probe(engine.id, outcome)
        if self._conclude(engine, well=outcome is ProbeOutcome.OK):
            if engine.health.is_healthy:
                log.info("%s/%s is healthy again", self._cluster, engine.id)
            else:
                self._count_ejection(engine, "probes")
                log.warning("%s/%s is unhealthy: probe %s", self._cluster, engine.id, outcome)
        self.follow_outage(self._clock())

    def follow_outage(self, now: float, *, log_it: bool = True) -> None:
        """Log one line when no engine is up any more, and one when the first is up again. Another process of this
        machine logs what it found itself (`log_it`)."""
        all_down = self._is_all_down(now)
        if all_down is self._all_down:
            return
        self._all_down = all_down
        if not log_it:
            return
        members = self._members.present
        if all_down:
            count = sum(one.condition(now) in DOWN for one in members)
            log.error("no engine of %s is up (%d down); requests go to all of them", self._cluster, count)
        else:
            up = next((str(one.id) for one in members if one.condition(now) in TAKING), "none is left")
            log.info("%s has an engine again: %s", self._cluster, up)

    def _is_all_down(self, now: float) -> bool:
        members = self._members.present
        if any(one.condition(now) in TAKING for one in members):
            return False
        return any(one.condition(now) in DOWN for one in members)

    def receive_probe(self, name: EndpointId, outcome: ProbeOutcome) -> None:
        """Another process of this machine probed the engine of this name just now."""
        members = self._members.find_named(name) if self.settings.active else ()
        for one in members:
            one.health.heard = True
            one.metrics.last_probe = outcome.value
        if members:
            self._conclude(members[0].engine, well=outcome is ProbeOutcome.OK)
            self.follow_outage(self._clock(), log_it=False)

    def _conclude(self, engine: Engine, *, well: bool) -> bool:
        """From a probe; whether it changed the verdict."""
        if changed := engine.health.record_probe(well, self._clock()):
            self._screening.invalidate(*self._members.of_engine(engine))
            if well:
                self._on_return(engine)
        if not well and not engine.health.is_healthy:
            self._give_back(lambda endpoint: endpoint.engine is engine)
        elif changed:
            self.give_back_all()
        return changed

    def give_back_all(self) -> None:
        """There may be an alternative now for what waits on unhealthy engines."""
        self._give_back(lambda endpoint: not endpoint.health.is_healthy)

    def _eject(self, engine: Engine, now: float) -> None:
        length_s = engine.health.eject(now)
        self._count_ejection(engine, "failures")
        self._screening.invalidate(*self._members.of_engine(engine))
        log.warning("%s/%s is ejected for %.1f s: requests failed in a row", self._cluster, engine.id, length_s)
        self.follow_outage(now)
        if not self.settings.active:  # without probes nothing follows
            self._give_back(lambda endpoint: endpoint.engine is engine)

    def _count_ejection(self, engine: Engine, reason: str) -> None:
        for endpoint in self._members.of_engine(engine):
            endpoint.metrics.count_ejection(reason)

    def _give_back(self, concerned: Callable[[Endpoint], bool]) -> None:
        """Offer what waits for a first byte there to its requests; each decides what to do with itself."""
        for endpoint in filter(concerned, [one for one in self._members.all_endpoints() if one.waiting]):
            for give_back in tuple(endpoint.waiting.values()):
                give_back()
