"""One engine at its address, with what its data-parallel ranks share: health, credential, breaker, which there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kvproxy.base.resilience.breaker import Breaker
from kvproxy.base.tls.files import ClientTls
from kvproxy.base.types import Clock, EndpointId
from kvproxy.base.upstream.origin import Origin
from kvproxy.cluster.adapters import Adapters
from kvproxy.cluster.ranks import Ranks
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, HealthCheckSettings

#: Longest ejection, unless `eject_for` is longer.
_MAX_EJECTION_S = 300.0

#: 2**this times `eject_for` is beyond any bound a person would write.
_MAX_DOUBLINGS = 20

#: An attempt that failed longer ago does not count.
_FAILING_S = 60.0


class Health:
    """Health of one engine: a pure state machine over probes and request outcomes.

    Two verdicts stand side by side and both must be good. *Probes* take an engine out after some failed ones in a row
    and bring it back after some good ones. *Ejection* follows failed requests, ends by itself, and lasts twice as long
    each time; every `eject_for` of good behaviour afterwards takes one doubling back. Answers of the 4xx kind and
    clients that leave are no failures and must not be reported as such.

    `now` is monotonic seconds and never steps back. `settings` may be replaced at any time: other bounds count from
    then on."""

    def __init__(self, settings: HealthCheckSettings) -> None:
        self.settings = settings
        self.heard = False  # another process probed it since its last turn here
        self._healthy = True  # until a probe fails
        self._ever_healthy = False
        self._streak = 0  # probes in a row that contradict the present state
        self.failures = 0  # failed requests in a row that are its own fault
        self.unserved = 0  # attempts in a row without a response, for whatever reason
        self._unserved_at = -math.inf  # the last of them
        self._failed_clients: tuple[str, ...] = ()  # the first two that got a 500 since the last success
        self._ejected_until = -math.inf
        self._ejections = 0  # number of doublings of the next ejection

    @property
    def is_healthy(self) -> bool:
        """The probes' verdict."""
        return self._healthy

    @property
    def failed_probes(self) -> int:
        """Probes in a row that contradict the present verdict: the first sign of an engine that died."""
        return self._streak

    @property
    def ejected_until(self) -> float:
        """When the latest ejection ends or ended."""
        return self._ejected_until

    def ejected(self, now: float) -> bool:
        """Return True while failed requests keep the engine out."""
        return now < self._ejected_until

    def record_probe(self, well: bool, now: float) -> bool:
        """Take a probe's result; whether it changed the verdict.

        An endpoint that never passed a probe goes out with the first failed one: it is still starting, or was
        configured wrongly.
        """
        self._ever_healthy = self._ever_healthy or well
        if well is self._healthy:
            self._streak = 0
            return False
        self._streak += 1
        if self._streak < self._needed(well):
            return False
        self._healthy = well
        self._streak = 0
        if well:
            self.unserved = 0
        return True

    def forget_probes(self) -> None:
        """Forget the verdict of probes after they were switched off: it would never change."""
        self._healthy = True
        self._streak = 0

    def unserved_in_a_row(self, now: float) -> int:
        """Latest attempts that served nothing (blame apart); 0 when the last one is too long ago to mean anything."""
        return self.unserved if now - self._unserved_at < _FAILING_S else 0

    def record_unserved(self, now: float) -> None:
        """Record an attempt that ended with a failure, "busy" or nothing; blame apart."""
        self.unserved = self.unserved_in_a_row(now) + 1
        self._unserved_at = now

    def record_success(self) -> None:
        """Record an answered request."""
        self.failures = self.unserved = 0
        self._failed_clients = ()

    def fails_only_for(self, client: str) -> bool:
        """Record that this client's request got a 500; return True if no other client's did since the last success."""
        if len(self._failed_clients) < 2 and client not in self._failed_clients:
            self._failed_clients += (client,)
        return len(self._failed_clients) < 2

    def record_failure(self, now: float) -> bool:
        """Return the engine failed a request; whether it now deserves ejection (the cluster decides if it can be
        spared)."""
        if now < self._ejected_until:
            return False  # late failures of requests from before the ejection
        self.failures += 1
        return 0 < self.settings.eject_after <= self.failures

    def eject(self, now: float) -> float:
        """Take it out; for how many seconds."""
        settings = self.settings
        if self._ejections:
            good_s = max(0.0, now - self._ejected_until)
            forgiven = int(good_s / settings.eject_for) if settings.eject_for else self._ejections
            self._ejections = max(0, self._ejections - forgiven)
        length_s = min(settings.eject_for * 2.0**self._ejections, max(_MAX_EJECTION_S, settings.eject_for))
        self._ejections = min(self._ejections + 1, _MAX_DOUBLINGS)
        self._ejected_until = now + length_s
        self.failures = 0
        return length_s

    def next_change(self, now: float) -> float:
        """When time alone will change an answer of this object; infinite if it will not."""
        return self._ejected_until if now < self._ejected_until else math.inf

    def _needed(self, well: bool) -> int:
        if well:
            return self.settings.healthy_threshold
        return self.settings.unhealthy_threshold if self._ever_healthy else 1


class Engine:
    """Server of a cluster. Its endpoints are its ranks, or it is the only one.

    `on_breaker_change` is called when its breaker changed for another reason than time."""

    __slots__ = ("adapters", "authorization", "breaker", "health", "id", "members", "origin", "ranks", "software")

    def __init__(
        self,
        config: EndpointSettings,
        settings: ClusterSettings,
        *,
        cluster: str,
        clock: Clock,
        on_breaker_change: Callable[[Engine], None],
        adapters: Adapters,
    ) -> None:
        self.id = EndpointId(config.id)
        self.origin = origin_of(config)
        self.health = Health(settings.health)
        name = f"{cluster}/{config.id}"
        self.breaker = Breaker(name, settings.breaker, clock=clock, on_change=partial(on_breaker_change, self))
        self.ranks = Ranks(config.data_parallel or settings.data_parallel)
        self.adapters = adapters
        self.members: tuple[EndpointId, ...] = ()  # its endpoints in the cluster
        self.software: str | None = None  # such as "vLLM 0.32.0"; "": not reported; None: not queried
        self.configure(config, settings)

    def __repr__(self) -> str:
        return f"<Engine {self.id} {self.origin}>"

    def configure(self, config: EndpointSettings, settings: ClusterSettings) -> None:
        """Take over what may change while it runs."""
        self.health.settings = settings.health
        self.breaker.settings = settings.breaker
        self.ranks.configure(config.data_parallel or settings.data_parallel)
        key = config.api_key.get_secret_value() if config.api_key else ""
        self.authorization = f"Bearer {key}".encode() if key else None  # never in repr, status or logs

    def endpoint_id(self, rank: int | None) -> EndpointId:
        """Return the id of this rank's endpoint; None: the engine as one."""
        return self.id if rank is None else EndpointId(f"{self.id}@{rank}")


def origin_of(config: EndpointSettings) -> Origin:
    """Where the engine listens; ValueError when its URL is none."""
    tls = ClientTls(config.ca_file, config.insecure, config.cert_file, config.key_file)
    return Origin.parse(config.url, tls=tls, server_name=config.server_name)
