"""Initial transfer of state to a new proxy from one that answers, or another if that one dies. Pure; the time is an
argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from kvproxy.features.exchange.deltas import Delta
from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.wire import Message, Origin, StateChunk, StateRequest

#: How long to wait for the first answer, for the next part of the snapshot, and until it is applied.
ANSWER_S = 0.5
PIECE_S = 2.0
APPLY_S = 30.0
#: A snapshot of a peer is not taken beyond this.
MAX_SNAPSHOT_BYTES = 64 * 1024 * 1024
_DELTA_BYTES = 100  # estimated memory of one delta

#: Given the peer, its snapshot and the rest as deltas; it has joined when that is done.
ReceiveSnapshot = Callable[[Peer, bytes, Sequence[Delta]], None]


class Joining:
    """Joining of a new proxy. `over` is called at the end, however it went."""

    def __init__(
        self,
        origin: Origin,
        *,
        send_to: Callable[[Origin, Message], None],
        receive: ReceiveSnapshot | None,
        over: Callable[[float], None],
    ) -> None:
        self.running = False
        self.told = False  # one of the others has sent its whole state
        self._origin = origin
        self._send_to = send_to
        self._receive = receive
        self._over = over
        self._until = 0.0
        self._late = False  # the latest look came after that
        self._candidates: dict[Origin, int] = {}
        self._asked: set[Origin] = set()
        self._peer: Origin | None = None  # peer whose whole state was requested
        self._number = self._size = 0  # of the piece that comes next, and of those before it
        self._data: list[bytes] = []
        self._deltas: list[Delta] = []

    @property
    def snapshot_bytes(self) -> int:
        """Bytes received so far."""
        return self._size

    def begin(self, now: float) -> None:
        """Begin for a new process."""
        self._reset(now)
        self.running = True

    def heard_of(self, peer: Origin, blocks: int, now: float) -> None:
        """Note a peer that could be the source, with so many blocks in its indexes."""
        if peer not in self._asked:
            self._candidates[peer] = blocks
            if self._peer is None:
                self._until = min(self._until, now + 0.1 * ANSWER_S)  # others may answer as well

    def look(self, now: float) -> None:
        """Ask another, or end, if the wait was long enough at two looks in a row: a process that stood still reads the
        answers that came meanwhile between them."""
        late = self.running and now >= self._until
        if late and self._late:
            self._ask_another(now)
        self._late = late

    def take_piece(self, peer: Peer, piece: StateChunk, now: float) -> None:
        """Take a part of the requested snapshot."""
        if not self.running or peer.origin != self._peer:
            return
        self._size += len(piece.data) + _DELTA_BYTES * len(piece.deltas)
        if piece.number != self._number or self._size > MAX_SNAPSHOT_BYTES:
            self._ask_another(now)
            return
        self._number += 1
        self._until = now + (PIECE_S if piece.more else APPLY_S)
        self._data.append(piece.data)
        self._deltas += piece.deltas
        if not piece.more and self._receive is not None:
            self._receive(peer, b"".join(self._data), self._deltas)
        elif not piece.more:
            self.end(now)

    def end(self, now: float, *, told: bool = False) -> None:
        """End joining; `told`: a peer's state was received."""
        if self.running:
            self.told = told
            self._reset(now)
            self.running = False
            self._over(now)

    def _ask_another(self, now: float) -> None:
        if not self._candidates:
            self.end(now)
            return
        me = self._origin
        most = max(self._candidates.values())  # others may be as new, and have nothing yet
        full = [one for one, blocks in self._candidates.items() if 2 * blocks >= most]
        self._peer = max(full, key=lambda one: xxh3_64_intdigest(f"{me} {one}".encode()))
        del self._candidates[self._peer]
        self._asked.add(self._peer)
        self._forget_pieces()
        self._until = now + PIECE_S
        self._send_to(self._peer, StateRequest(me))

    def _reset(self, now: float) -> None:
        self._until = now + ANSWER_S
        self._peer = None
        self._candidates = {}
        self._asked = set()
        self._forget_pieces()

    def _forget_pieces(self) -> None:
        self._number = self._size = 0
        self._data = []
        self._deltas = []
