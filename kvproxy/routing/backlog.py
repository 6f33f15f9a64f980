"""A load ledger looked at without drawing conclusions: for those who watch decisions and must not influence them.

`EndpointLoad.wait_s` takes hidden requests out of the ledger once they must be prefilled by the speeds it is asked
with. That is for the deciding policy alone; with other speeds it would be another decision's conclusion.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from kvproxy.routing.load import MAX_PROGRESS, NO_WORK, EndpointLoad, Features, head_of, seconds_of


class Backlog(msgspec.Struct, frozen=True):
    """What an engine still has to prefill at one moment."""

    work: Features  # of everything pending
    head: Features  # of what it is at work on
    elapsed_s: float  # since that work began, as far as is known

    def wait_s(self, seconds: Features, slowness: float) -> float:
        """Until it would begin with a request placed now; `seconds` and `slowness` as in `EndpointLoad.wait_s`."""
        if self.work is NO_WORK:
            return 0.0
        progress = MAX_PROGRESS * slowness * seconds_of(self.head, seconds)
        wait = slowness * seconds_of(self.work, seconds) - min(progress, max(0.0, self.elapsed_s))
        return max(0.0, wait)


IDLE = Backlog(NO_WORK, NO_WORK, 0.0)


def backlog_of(load: EndpointLoad, seconds: Features | None, slowness: float, now: float) -> Backlog:
    """The ledger as it stands. Hidden requests whose time has passed are left out; with unknown speeds (None) none."""
    pending = load.pending
    if not pending:
        return IDLE
    if seconds is None or not next(iter(pending)).hidden:
        return Backlog(load.pending_work, load.head(), now - load.busy_since)
    work, begun, overdue = load.pending_work, load.busy_since, 0
    for reservation, own in pending.items():
        end = begun + slowness * seconds_of(own, seconds)
        if not reservation.hidden or now < end:
            break
        begun = end
        work = (work[0] - own[0], work[1] - own[1], work[2] - own[2], work[3] - own[3])
        overdue += 1
    if overdue == len(pending):
        return IDLE
    head = head_of(islice(pending.values(), overdue, None)) if overdue else load.head()
    return Backlog(work, head, now - begun)


class ReadOnlyLoad:
    """One endpoint's load for a policy that decides nothing."""

    __slots__ = ("_load",)

    def __init__(self, load: EndpointLoad) -> None:
        self._load = load

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self._load.in_flight

    @property
    def pending_requests(self) -> int:
        """Requests without a first token."""
        return self._load.pending_requests

    @property
    def pending_tokens(self) -> int:
        """Uncached prompt tokens of these."""
        return self._load.pending_tokens

    @property
    def resident_tokens(self) -> int:
        """Prompt tokens of live sequences."""
        return self._load.resident_tokens

    def wait_s(self, seconds: Features, slowness: float, now: float) -> float:
        """As `EndpointLoad.wait_s`, with the ledger left as it is."""
        return backlog_of(self._load, seconds, slowness, now).wait_s(seconds, slowness)
