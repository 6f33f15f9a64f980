"""Conversations between an answer and their next turn, found by the prompt that goes on, or by their session."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvproxy.base.types import EndpointId
from kvproxy.cache.action_settings import LeaseSettings
from kvproxy.features.leases.gaps import HORIZON_S, Gaps, PauseKind

#: Answers whose next turns are looked out for; the longest waiting go first.
MAX_WAITING = 16_384
#: A conversation that comes back less often is not worth a lease, nor a touch.
LEAST_CHANCE = 0.2
#: For a call of a tool of which nothing is known yet.
FIRST_S = 60.0
#: The first and last turns of a conversation differ by so many message prefixes at most.
LOOKED_AT = 17


@dataclass(frozen=True, slots=True)
class Waiting:
    """A conversation between an answer and its next turn, known by the key of its last prompt."""

    key: int
    kind: PauseKind
    ended_at: float
    endpoint: EndpointId
    cluster: str
    tenant: str = ""
    session: int = 0  # 0: it names none
    asked_s: float | None = None  # that its client wants the prompt to be kept


def choose_duration(of: Waiting, gaps: Gaps, settings: LeaseSettings) -> float | None:
    """How long the prompt is worth keeping: until most pauses of its kind were over, and never longer than its client
    asked for. None: it is not, since no return is expected, or hardly any comes."""
    pending = bool(of.kind[1])
    known = gaps.find(of.kind)
    if not pending and of.asked_s is None:
        return None
    most = settings.max_duration if of.asked_s is None else min(of.asked_s, settings.max_duration)
    if known is None:
        return most if of.asked_s is not None else min(most, FIRST_S)
    usual = known.quantile(settings.share)
    if usual is None or known.share_over(most) < LEAST_CHANCE:
        return None
    return min(most, usual)


class BySession:
    """Which keys belong to each session; those without one are left out."""

    def __init__(self) -> None:
        self._keys: dict[int, set[int]] = {}

    def add(self, of: Waiting) -> None:
        """One more."""
        if of.session:
            self._keys.setdefault(of.session, set()).add(of.key)

    def discard(self, of: Waiting) -> None:
        """One less, if it is there."""
        keys = self._keys.get(of.session, set())
        keys.discard(of.key)
        if not keys:
            self._keys.pop(of.session, None)

    def keys_of(self, session: int) -> Collection[int]:
        """As they are now."""
        return tuple(self._keys.get(session, ()))


class Conversations:
    """Those that may go on, by key, the longest waiting first."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._sessions = BySession()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def get(self, key: int) -> Waiting | None:
        """Return the one whose last prompt has this key."""
        return self._waiting.get(key)

    def add(self, waiting: Waiting) -> None:
        """An answer is over, and its conversation may go on."""
        self._take(waiting.key)
        self._waiting[waiting.key] = waiting
        self._sessions.add(waiting)
        if len(self._waiting) > MAX_WAITING:
            self._take(next(iter(self._waiting)))

    def take_returned(self, keys: Sequence[int]) -> Waiting | None:
        """Return the one that a prompt with these message prefixes goes on from."""
        return next((found for key in reversed(keys[-LOOKED_AT:]) if (found := self._take(key)) is not None), None)

    def take_late(self, now: float) -> Iterator[Waiting]:
        """Those that wait for too long: they are not expected to go on."""
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if now - first.ended_at <= HORIZON_S:
                break
            self._take(first.key)
            yield first

    def end_session(self, session: int) -> None:
        """Nothing more comes of it."""
        for key in self._sessions.keys_of(session):
            self._take(key)

    def _take(self, key: int) -> Waiting | None:
        found = self._waiting.pop(key, None)
        if found is not None:
            self._sessions.discard(found)
        return found
