"""Features with the members that all rooms ask for: the class that authors of features derive from."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvproxy.cache.feature import CacheFeature
from kvproxy.cluster.feature import ClusterFeature
from kvproxy.proxy.feature import ProxyFeature

if TYPE_CHECKING:
    import httpx
    from starlette.routing import Route

    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.endpoint import Endpoint
    from kvproxy.cluster.routing.selector import Decision
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.companion import Companion, Siblings
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment, StoreFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.receipts.writer import WritingObserver
    from kvproxy.operate.runtime.operated import AdminTarget, OperatorFinding

    #: Serves until a signal, as `serve_until_signal` of operate/commands/serve.py does, whose arguments it takes.
    Run = Callable[..., Coroutine[Any, Any, int]]


class StatusPart(NamedTuple):
    """Words for the first line of `kvproxy status`, and blocks of lines."""

    headline: Sequence[str] = ()
    blocks: Sequence[Sequence[str]] = ()


ON = "on"
OFF = "off"


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of `kvproxy check`, `kvproxy status` and the live page: what is on and why."""

    name: str
    state: str  # ON or OFF
    reason: str
    gain: str = ""  # the setting that brings it, and what for, if it is off and helps most deployments


class Feature(ClusterFeature, CacheFeature, ProxyFeature):
    """One optional capability: a folder, its line in `kvproxy/features/__init__.py`, and nothing anywhere else."""

    #: Name of its panel of the live page: NAME.html beside its module, and NAME.js, which exports `show(live)`.
    panel: ClassVar[str] = ""

    #: Paths of the admin listener whose changes take long: seconds until a process counts as giving no answer.
    slow_changes: ClassVar[Mapping[str, float]] = {}

    def observe_requests(self, proxy: AdminTarget, config: Config) -> Sequence[WritingObserver[Any]]:
        """Observers of all requests, made once for a process: entered before the first, left after the last."""
        return ()

    def find_runner(self, config: Config) -> Run | None:
        """Return the runner of this configuration in place of a single process; None: none."""
        return None

    def accompany(self, proxy: AdminTarget, config: Config, *, siblings: Siblings | None) -> Companion | None:
        """Its part beside the proxy, made once for a process; None: it has none."""
        return None

    def explain(self, receipt: Receipt) -> Iterable[str]:
        """Lines of `kvproxy explain` and of the live page about its note, which `note_of` reads."""
        return ()

    def describe_pick(self, decision: Decision[Endpoint], cluster: Cluster) -> Mapping[str, object]:
        """Keys that it adds to an answer of `/pick`, before the request is counted in."""
        return {}

    def find_troubles(self, operated: AdminTarget) -> Iterable[OperatorFinding]:
        """Return the current findings for the live page. A `Trouble` has its own rank and patience."""
        return ()

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Rows that show whether it is on; `operated` is the running proxy, if there is one."""
        return ()

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Its paths of the admin listener."""
        return ()

    def describe_live(self, operated: AdminTarget) -> Mapping[str, object]:
        """Keys that it adds to `/live`."""
        return {}

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """By path of the admin listener (`*` stands for any part) and member of its answer, how answers of several
        processes become one."""
        return {}

    def show_status(self, live: Mapping[str, Any], *, colour: bool) -> StatusPart:
        """Its part of `kvproxy status`, from an answer of `/live`."""
        return StatusPart()

    def advise(self, receipts: Sequence[Receipt], memory_tokens: Sequence[int]) -> Iterable[str]:
        """Sentences of `kvproxy doctor --advise` that follow from the receipts of one pool, in order of their ends, and
        the KV memory of each of its engines that reports it."""
        return ()

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Iterable[Check]:
        """Return checks of `kvproxy doctor` for what it adds to a deployment. `trial`: prompts are sent."""
        return ()

    def list_store_checks(self, store: StoreFacts) -> Sequence[Check]:
        """Check of `kvproxy doctor` for the store beside the engines, where one is configured."""
        return ()

    async def find_store_kind(self, http: httpx.AsyncClient, url: str) -> str:
        """Return the kind of store that answers at a URL, for `kvproxy init`; "": none that it knows. Raises
        ClientError."""
        return ""
