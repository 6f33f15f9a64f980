"""Body of a request that another program carries, and its answer: where it came from, when, what it counts, how it
ended."""

from __future__ import annotations

from kvproxy.base.errors import UpstreamError
from kvproxy.base.types import Headers
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.operate.placing.carried import CarriedRequest
from kvproxy.operate.placing.external import address_of
from kvproxy.operate.placing.reservations import PickReservation
from kvproxy.proxy.forward.relay import LAST_PIECES, TAIL_BYTES, read_end
from kvproxy.proxy.request.body import BodyTooLarge, HeldBodies


class CarriedBody:
    """Pieces of one body, counted among those of all requests as long as they are held."""

    def __init__(self, held: HeldBodies, *, most_bytes: int) -> None:
        self.has_trailers = False
        self._held = held
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Hold a piece. Raises BodyTooLarge and BodiesFull."""
        if self._size + len(piece) > self._most_bytes:
            raise BodyTooLarge(self._most_bytes)
        self._held.hold_bytes(len(piece))
        self._size += len(piece)
        if piece:
            self._pieces.append(piece)

    def join(self) -> bytes:
        """Return all of it."""
        return b"".join(self._pieces)

    def drop_pieces(self) -> None:
        """Forget the pieces; the prompt is still held, and counted."""
        self._pieces = []

    def drop(self) -> None:
        """Forget it and count it no more."""
        self._held.give_back(self._size)
        self._pieces = []
        self._size = 0


class CarriedAnswer:
    """Begins with the answer's head; `completed` ends its request."""

    def __init__(self, request: CarriedRequest, status: int, headers: Headers) -> None:
        self._request = request
        self._headers = headers
        self._outcome = request.exchange.outcome
        self._outcome.status = status
        self._first = b""
        self._last: list[bytes] = []

    def locate(self, address: str, details: str) -> str:
        """Locate the answer: from `address` ("": not reported), or from the carrier itself (`details` show why). The
        load follows. Returns the relation to the pick, a metric label."""
        request = self._request
        held = self._request.held
        if not details and held is not None:
            return self._follow(held, address) if address else "unreported"
        self._outcome.end = "local_reply"
        unreached = details.startswith("upstream")
        request.settle(AttemptOutcome.FAILURE if unreached else AttemptOutcome.CANCELLED)
        return "none"

    def _follow(self, held: PickReservation, address: str) -> str:
        if address == address_of(held.pick.endpoint):
            return "as_picked"
        request = self._request
        cluster = held.cluster
        fallback = next((each for each in request.listed if address_of(each) == address), None)
        served = fallback or next((each for each in cluster.endpoints if address_of(each) == address), None)
        # The reason is not reported: the first could not be reached, or the carrier does not have it.
        request.settle(AttemptOutcome.CANCELLED if fallback is None else AttemptOutcome.UNPROVEN)
        if served is None:
            return "unknown"
        now = request.placer.clock()
        request.move_to(served, now)
        self._outcome.endpoint = served.id
        return "elsewhere" if fallback is None else "fallback"

    def piece(self, data: bytes) -> None:
        """Read a piece of the body."""
        if not data:
            return
        if not self._first:
            self._first = data
            if self._request.is_streamed:
                self._request.first_byte(self._request.placer.clock())
        self._last.append(data)
        if len(self._last) > LAST_PIECES:
            del self._last[0]

    def completed(self) -> None:
        """Complete the answer."""
        request = self._request
        outcome = self._outcome
        outcome.end = outcome.end or "completed"
        request.answered(self._read_end() if self._last else None)

    def _read_end(self) -> UpstreamError | None:
        *earlier, last = self._last
        tail = b"".join(earlier)[-TAIL_BYTES:] + last
        request = self._request
        return read_end(
            request.exchange, self._outcome.status, self._headers, first=self._first, tail=tail, post=request.post
        )
