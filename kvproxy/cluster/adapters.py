"""LoRA adapters: which engine serves which, and the seconds to run one there.

An engine has the weights of a few adapters loaded at a time (its slots). A request for another one waits until they are
loaded, and until a slot is free. How long that takes is learned, by how the engine stood when the request was placed,
from first tokens that came later than its backlog explains."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvproxy.base.types import EndpointId

log = logging.getLogger(__name__)

#: Bound on the adapters of one engine, whose names it chooses.
MAX_ADAPTERS = 1024
MAX_NAME = 200
#: Slots of an engine that does not report them: vLLM's default.
_SLOTS = 1


@dataclass(frozen=True, slots=True)
class LoraUse:
    """As of the engine's latest steps: after the last request of an adapter the engine may go on naming it."""

    slots: int  # adapters whose requests run at the same time; 0: not reported
    running: frozenset[str]
    waiting: frozenset[str]


class AdapterState(StrEnum):
    """How an engine stands to an adapter."""

    RUNNING = "running"  # its weights are in a slot
    ROOM = "room"  # they are not, and a slot is free
    WAITING = "waiting"  # requests for it already wait there
    FULL = "full"  # all slots are in use by other adapters


class Adapters:
    """One engine's. `elsewhere` has the names that any engine of its cluster lists."""

    __slots__ = ("_recent", "_requests", "elsewhere", "names", "use")

    def __init__(self, elsewhere: Mapping[str, int]) -> None:
        self.elsewhere = elsewhere
        self._requests: Counter[str] = Counter()  # our requests in flight, by adapter
        self._recent: OrderedDict[str, None] = OrderedDict()  # adapters of recent requests, the latest last
        self.names: frozenset[str] = frozenset()  # as the engine lists them
        self.use: LoraUse | None = None

    def state(self, adapter: str) -> AdapterState:
        """State by the engine's last report and the requests placed since."""
        use = self.use
        running: frozenset[str] = frozenset() if use is None else use.running
        if adapter in self._requests or adapter in running or adapter in self._recent:
            return AdapterState.RUNNING
        if use is not None and adapter in use.waiting:
            return AdapterState.WAITING
        busy = len(running | self._requests.keys())
        return AdapterState.FULL if busy >= self.slots else AdapterState.ROOM

    @property
    def pushes_out(self) -> bool:
        """True if loading one more adapter takes the slot of one that was used recently."""
        return len(self._recent) >= self.slots

    @property
    def slots(self) -> int:
        """Adapters that run at the same time."""
        return (0 if self.use is None else self.use.slots) or _SLOTS

    def begin_request(self, adapter: str) -> None:
        """Count a request for the adapter; `end_request` follows."""
        self._requests[adapter] += 1
        self._recent[adapter] = None
        self._recent.move_to_end(adapter)
        while len(self._recent) > self.slots:
            self._recent.popitem(last=False)

    def end_request(self, adapter: str) -> None:
        self._requests[adapter] -= 1
        if self._requests[adapter] <= 0:
            del self._requests[adapter]

    def forget_loaded(self) -> None:
        """Its process is another one: nothing is loaded."""
        self._recent.clear()
        self.use = None

    def status(self) -> dict[str, object] | None:
        """For people; None where there are none."""
        if not self.names:
            return None
        in_use = sorted(name for name in self.names if self.state(name) is AdapterState.RUNNING)
        return {"served": sorted(self.names), "loaded": in_use, "slots": None if self.use is None else self.slots}


#: Seconds that a request waits for an adapter beside the engine's backlog, before the first sample.
_PRIOR_S = {AdapterState.RUNNING: 0.0, AdapterState.ROOM: 0.2, AdapterState.WAITING: 0.5, AdapterState.FULL: 1.0}
_PRIOR_WEIGHT = 3
_WEIGHT = 0.1
_MOST_S = 60.0


class LoadTimes:
    """Mean wait of requests beyond the backlog's, by the adapter's state at their engine."""

    def __init__(self) -> None:
        self._mean_s = dict(_PRIOR_S)
        self.samples: Counter[AdapterState] = Counter()

    def observe_wait(self, state: AdapterState, late_s: float) -> None:
        """Record by how many seconds a first token was later than expected."""
        self.samples[state] += 1
        weight = max(_WEIGHT, 1.0 / (_PRIOR_WEIGHT + self.samples[state]))
        self._mean_s[state] += weight * (min(max(late_s, 0.0), _MOST_S) - self._mean_s[state])

    def expected_s(self, state: AdapterState) -> float:
        """Return what it costs to place a request where that is so."""
        return max(0.0, self._mean_s[state] - self._mean_s[AdapterState.RUNNING])


class Placement(msgspec.Struct, eq=False):
    """One request for an adapter, from its pick to its end."""

    adapters: Adapters
    times: LoadTimes
    adapter: str
    state: AdapterState
    expected_at: float | None  # expected time of its first token, without the adapter; None: hidden
    over: bool = False

    def first_token(self, now: float) -> None:
        """Record the arrival of the first token."""
        if self.expected_at is not None:
            self.times.observe_wait(self.state, now - self.expected_at)
            self.expected_at = None

    def end(self) -> None:
        """End the attempt. Idempotent."""
        if not self.over:
            self.over = True
            self.adapters.end_request(self.adapter)


class KnownAdapters:
    """Adapters of a cluster's engines. `on_change` is called when the adapters that engines serve changed."""

    def __init__(self, cluster: str, *, on_change: Callable[[], None]) -> None:
        self._cluster = cluster
        self._on_change = on_change
        self.names: Counter[str] = Counter()  # engines that list it, by adapter
        self.times = LoadTimes()
        self.lost: set[str] = set()  # once listed, and now by no engine of the cluster

    def keep_engines(self, present: Iterable[Adapters]) -> None:
        """Set the cluster's engines."""
        before = set(self.names)
        self.names.clear()  # in place: engines share it
        for adapters in present:
            if adapters.names:
                self.names.update(adapters.names)
        lost = (self.lost | before) - self.names.keys()
        self.lost = set(sorted(lost)[:MAX_ADAPTERS])

    def observe_list(self, engine: str, adapters: Adapters, *, listed: Iterable[str]) -> None:
        names = frozenset(sorted({name for name in listed if 0 < len(name) <= MAX_NAME})[:MAX_ADAPTERS])
        if names != adapters.names:
            log.info("%s/%s serves the adapters %s", self._cluster, engine, ", ".join(sorted(names)[:8]) or "none")
            adapters.names = names
            self._on_change()

    def record_missing(self, engine: str, adapters: Adapters, adapter: str) -> None:
        """Record the engine's reply that it lacks the adapter: it gets none of its requests until it lists it again."""
        if adapter in adapters.names:
            log.warning("%s/%s no longer has the adapter %s", self._cluster, engine, adapter)
            adapters.names -= {adapter}
            self._on_change()

    def price_endpoints(self, adapter: str, engines: Mapping[EndpointId, Adapters]) -> Mapping[EndpointId, float]:
        """Seconds that the adapter adds, by endpoint: to this request, and where it takes another one's slot, to load
        that one again."""
        prices = {}
        for endpoint, adapters in engines.items():
            state = adapters.state(adapter)
            prices[endpoint] = self.times.expected_s(state)
            if state is not AdapterState.RUNNING and adapters.pushes_out:
                prices[endpoint] += self.times.expected_s(AdapterState.ROOM)
        return prices

    def place_request(self, adapters: Adapters, adapter: str, expected_at: float | None) -> Placement:
        """Place a request for the adapter at this engine; its first token was expected at `expected_at`."""
        placement = Placement(adapters, self.times, adapter, adapters.state(adapter), expected_at)
        adapters.begin_request(adapter)
        return placement

    def estimates(self) -> dict[str, object] | None:
        """Return what was learned, for people; None where there are no adapters."""
        if not self.names:
            return None
        return {
            state.value: {"seconds": round(self.times.expected_s(state), 4), "samples": self.times.samples[state]}
            for state in AdapterState
        }
