"""How long a conversation pauses between an answer and its next turn: what it waits for, read from the answer as it
passes, and what pauses of that kind have lasted."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator

from kvproxy.base.bounded import BoundedMapping

#: Kinds of pauses that are told apart: a client chooses the names of its tools.
MAX_KINDS = 512
#: Of these, shown to people.
MAX_SHOWN = 50
#: Pauses of one kind after which all of them count half, so that what clients do today wins.
_HALVED_AT = 512.0
#: A kind is known by so many.
LEAST_SEEN = 8.0
#: Upper ends of the classes of pauses in seconds, each twice the fourth root of the last; up to 68 minutes.
BOUNDS_S = tuple(0.25 * 2 ** (step / 4) for step in range(57))
HORIZON_S = BOUNDS_S[-1]

#: Names of tools, of those whose name could not be seen, and of all of them. "": the answer calls none.
UNSEEN = "?"
ANY = "*"
#: Client and tool; "" as the client: any.
PauseKind = tuple[str, str]

#: Sessions whose pauses are remembered, and how much a new pause counts against the earlier ones.
_MAX_SESSIONS = 10_000
_NEW = 0.3

_MAX_NAME = 64
_AROUND = 512  # bytes of an object in which its type and its name stand
_named_function = re.compile(rb'"function"\s?:\s?\{\s?"name"\s?:\s?"([^"\\]{1,64})"').search
_finished = re.compile(rb'"(?:finish|stop)_reason"\s?:\s?"tool_(?:calls|use)"').search
_item = re.compile(rb'"type"\s?:\s?"(tool_use|function_call|custom_tool_call|local_shell_call|computer_call)"').search
_name = re.compile(rb'"name"\s?:\s?"([^"\\]{1,64})"').search


class PendingCall:
    """Whether an answer ends in calls of tools, and the name of the first of them. What is looked for cannot be in
    generated text, whose quotes are escaped; a name that the network cut in two goes unseen."""

    __slots__ = ("_name", "tool")

    def __init__(self) -> None:
        self._name = ""
        self.tool: str | None = None  # None: the answer calls none, as far as it went

    def read_piece(self, piece: bytes) -> None:
        """The answer passes."""
        if not self._name and b'"function"' in piece and (found := _named_function(piece)):
            self._name = found[1].decode("utf-8", "replace")
        elif b'_call"' in piece or b'"tool_use"' in piece:
            self._read_item(piece)
        if b'"tool_' in piece and _finished(piece):
            self.tool = self._name or UNSEEN

    def _read_item(self, piece: bytes) -> None:
        """An item of Messages or of Responses; the latter say at their end no more than that they are complete."""
        found = _item(piece)
        if found is None:
            return
        begin = max(piece.rfind(b"{", 0, found.start()), found.start() - _AROUND, 0)
        name = _name(piece, begin, found.end() + _AROUND)
        self._name = self._name or ("" if name is None else name[1].decode("utf-8", "replace"))
        if found[1] != b"tool_use":
            self.tool = self._name or UNSEEN


class Pauses:
    """Pauses of one kind, in classes of their length."""

    __slots__ = ("_classes", "never", "seen")

    def __init__(self) -> None:
        self._classes = [0.0] * len(BOUNDS_S)
        self.never = 0.0  # conversations that did not go on within the horizon
        self.seen = 0.0

    def count(self, seconds: float | None) -> None:
        """One more; None: it did not end."""
        if seconds is None or seconds > HORIZON_S:
            self.never += 1.0
        else:
            self._classes[bisect_left(BOUNDS_S, seconds)] += 1.0
        self.seen += 1.0
        if self.seen >= _HALVED_AT:
            self._classes = [0.5 * each for each in self._classes]
            self.never = 0.5 * self.never
            self.seen = 0.5 * self.seen

    def share_over(self, seconds: float) -> float:
        """Share of them that were over so soon, of all."""
        if not self.seen or seconds <= 0:
            return 0.0
        at = bisect_left(BOUNDS_S, seconds)
        if at == len(BOUNDS_S):
            return 1.0 - self.never / self.seen
        low = BOUNDS_S[at - 1] if at else 0.0
        within = self._classes[at] * (seconds - low) / (BOUNDS_S[at] - low)
        return (sum(self._classes[:at]) + within) / self.seen

    def quantile(self, share: float) -> float | None:
        """Seconds within which this share was over of those that ended at all; None: none did."""
        ended = self.seen - self.never
        so_far = 0.0
        if ended < 0.5:
            return None
        for bound, here in zip(BOUNDS_S, self._classes, strict=True):
            so_far += here
            if so_far >= share * ended:
                return bound
        return HORIZON_S


class Gaps:
    """Pauses by client and tool, bounded; what is not known of a kind is taken from wider ones."""

    def __init__(self) -> None:
        self._known: BoundedMapping[PauseKind, Pauses] = BoundedMapping(MAX_KINDS)

    def __len__(self) -> int:
        return len(self._known)

    def count(self, kind: PauseKind, seconds: float | None) -> None:
        """A pause of this kind took so long; None: the conversation did not go on."""
        for each in dict.fromkeys((*_wider(kind), kind)):
            pauses = self._known.get(each)
            if pauses is None:
                pauses = self._known[each] = Pauses()
            pauses.count(seconds)

    def find(self, kind: PauseKind) -> Pauses | None:
        """Of the narrowest kind that was seen often enough."""
        for each in (kind, *_wider(kind)):
            pauses = self._known.get(each)
            if pauses is not None and pauses.seen >= LEAST_SEEN:
                return pauses
        return None

    def describe(self) -> list[dict[str, object]]:
        """For people: the most frequent kinds."""
        return [
            {
                "client": client,
                "tool": tool,
                "seen": round(pauses.seen, 1),
                "returned": 1.0 - pauses.never / pauses.seen,
                "median_s": pauses.quantile(0.5),
                "p95_s": pauses.quantile(0.95),
            }
            for (client, tool), pauses in sorted(self._known.items(), key=lambda row: -row[1].seen)[:MAX_SHOWN]
        ]


def pause_kind(client: str, tool_call: str | None) -> PauseKind:
    """Return the kind of the pause after an answer that ends in a call of this tool; None: of none."""
    return client, "" if tool_call is None else tool_call[:_MAX_NAME]


def _wider(kind: PauseKind) -> Iterator[PauseKind]:
    client, tool = kind
    if tool:
        yield client, ANY
        yield "", ANY
    else:
        yield "", ""


class SessionPauses:
    """How long after the end of one turn the next one comes, by session; of a new one, as long as with all."""

    def __init__(self) -> None:
        self._ended: BoundedMapping[int, tuple[float, float | None]] = BoundedMapping(_MAX_SESSIONS)
        self._usual: float | None = None  # logarithm of seconds

    def note_turn(self, session: int, began_at: float, now: float) -> float | None:
        """Return a turn that began then is over; the seconds until the next one, if anything is known."""
        ended_at, pause_s = self._ended.get(session, (None, None))
        if ended_at is not None and began_at > ended_at:
            seen_s = began_at - ended_at
            pause_s = seen_s if pause_s is None else pause_s + _NEW * (seen_s - pause_s)
            seen = math.log(seen_s)
            self._usual = seen if self._usual is None else self._usual + _NEW * (seen - self._usual)
        self._ended[session] = now, pause_s
        if pause_s is not None:
            return pause_s
        return None if self._usual is None else math.exp(self._usual)
