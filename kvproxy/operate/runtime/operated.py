"""The running proxy as its operator's listener sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from kvproxy.base.background_task import in_slices
from kvproxy.base.errors import Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.types import Clock
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.routes import Routes
from kvproxy.operate.companion import Companion
from kvproxy.operate.config.schema import Config
from kvproxy.operate.runtime.recent import RecentDecisions
from kvproxy.proxy.filters.chain import RequestGuard
from kvproxy.proxy.request.observer import RequestObserver

if TYPE_CHECKING:
    from kvproxy.operate.commands.live_advice import AdviceRunner


class OperatorFinding(Protocol):
    """Finding for an operator, from the configuration or from a check of the engines."""

    @property
    def severity(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def fix(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ConfigFinding:
    """An OperatorFinding. `severity` is `note`, `ok`, `warning` or `problem`."""

    severity: str
    where: str
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Event at `at`, on the proxy's clock. `kind` is that of its mark: down, warn, good or ""."""

    at: float
    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class RefusedFile:
    """A configuration file that was read and cannot be used; `changed_at` is its own age, on the proxy's clock."""

    errors: tuple[Problem, ...]
    changed_at: float


class ConfigReloader(Protocol):
    """Reads the configuration file again and applies it."""

    async def __call__(self) -> Reloaded: ...
    @property
    def file_name(self) -> str:
        """The file's name without its folder; "" without a file."""
        ...

    @property
    def loaded_at(self) -> float:
        """When the configuration in force was read, on the proxy's clock."""
        ...

    @property
    def refusal(self) -> RefusedFile | None:
        """Why the file as it was read last is not in force; None: it is."""
        ...

    @property
    def events(self) -> Iterable[Event]:
        """The last reloads, applied and refused."""
        ...


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Result of a reload: with `errors` nothing changed; `after_restart` names settings that need a restart."""

    errors: tuple[Problem, ...] = ()
    after_restart: tuple[str, ...] = ()


class OperatedProcess(Protocol):
    """Operations on the process, be it the proxy's own or that of several."""

    @property
    def config(self) -> Config: ...
    @property
    def reloader(self) -> ConfigReloader | None: ...
    @property
    def adviser(self) -> AdviceRunner | None: ...


class AdminTarget(OperatedProcess, Protocol):
    """Asked again for every request: a reload may have replaced any part."""

    @property
    def companions(self) -> Sequence[Companion]:
        """Long-lived parts of features beside it."""
        ...

    @property
    def clusters(self) -> Mapping[str, Cluster]: ...
    @property
    def routes(self) -> Routes: ...
    @property
    def kvcache(self) -> KvCache | None: ...
    @property
    def guards(self) -> Sequence[RequestGuard]: ...
    @property
    def findings(self) -> Sequence[OperatorFinding]: ...
    @property
    def certificates(self) -> CertificateWatch: ...
    @property
    def recent(self) -> RecentDecisions: ...
    @property
    def observers(self) -> Sequence[RequestObserver]: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def draining(self) -> bool: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def public_url(self) -> str:
        """URL for clients; "" until a listener reports it."""
        ...

    @property
    def wall_clock(self) -> Callable[[], datetime]: ...


#: By cluster, in the order of its endpoints.
Conditions = Mapping[str, Mapping[Endpoint, Condition]]


async def read_conditions(clusters: Mapping[str, Cluster], now: float) -> Conditions:
    """Return the conditions of all endpoints, of which thousands are read in slices."""
    return {
        name: {endpoint: endpoint.condition(now) async for endpoint in in_slices(cluster.endpoints)}
        for name, cluster in list(clusters.items())
    }
