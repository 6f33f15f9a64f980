"""The body of a request that Envoy carries, as it comes."""

from __future__ import annotations

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
