"""Messages between proxies, as msgpack."""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from kvproxy.cluster.routing.work import Finite
from kvproxy.features.exchange.deltas import Delta, EndpointLoads, Routed
from kvproxy.operate.runtime.approximate_dump import fingerprint

log = logging.getLogger("kvproxy.sync")

#: Version of the messages; proxies of other versions, or that hash prompts otherwise, use another topic.
VERSION = 6

#: Bound on a message, whatever the link.
MAX_BYTES = 60_000
#: Blocks sent of a longer prompt (2 MiB of text): the most that fits into a batch beside others.
MAX_BLOCKS = 6_000
#: Deltas of one message: applying takes some 15 us each, and must not hold the event loop.
MAX_DELTAS = 400

#: Ledgers of one message.
MAX_ROWS = 100
Deltas = Annotated[list[Delta], msgspec.Meta(max_length=MAX_DELTAS)]
Rows = Annotated[list[EndpointLoads], msgspec.Meta(max_length=MAX_ROWS)]


class Origin(msgspec.Struct, array_like=True, frozen=True, order=True, gc=False):
    """One proxy process. Another `epoch` under the same host and worker is another life of it."""

    host: str
    worker: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.host}/{self.worker}"

    @property
    def place(self) -> tuple[str, int]:
        """Host and worker, which the next life has in common."""
        return self.host, self.worker


class _Message(msgspec.Struct, array_like=True, frozen=True):
    origin: Origin


class Batch(_Message, tag=1, frozen=True):
    """Deltas in order; `seq` grows by one from batch to batch. `sent_s` is the sender's monotonic clock."""

    seq: int
    sent_s: Finite
    deltas: Deltas
    loads: Rows


class Echo(msgspec.Struct, array_like=True, frozen=True):
    """When a peer's latest beat was sent, by its clock, and how long ago it came."""

    peer: Origin
    sent_s: Finite
    held_s: Finite


class Heartbeat(_Message, tag=2, frozen=True):
    """Heartbeat: number of the last batch, and the sender's state. `told`: prompts in its batches."""

    seq: int
    sent_s: Finite
    told: int
    joining: bool
    blocks: int  # in its approximate indexes
    echoes: list[Echo]


class Hello(_Message, tag=3, frozen=True):
    """Begin of a new life: all others send their state."""


class Bye(_Message, tag=4, frozen=True):
    """It ends."""


class Ask(_Message, tag=5, frozen=True):
    """To one: its batches from this one on are missing (0: that is unknown). It sends those it has, and then how it
    stands."""

    first: int


class PeerSnapshot(_Message, tag=6, frozen=True):
    """To one: all loads and open requests after batch `seq`. More than fit into one message come in several, of which
    only the last has `more` false, and the open ones of the others go before."""

    seq: int
    oldest: int  # batch that can be sent again
    told: int
    open: list[Routed]
    loads: Rows
    more: bool


class StateRequest(_Message, tag=7, frozen=True):
    """Request for the whole state of one peer."""


class StateChunk(_Message, tag=8, frozen=True):
    """To one: a part of that: bytes of a snapshot in order, then deltas; the last has `more` false."""

    number: int
    data: bytes
    deltas: Deltas
    more: bool


class ClaimAsked(_Message, tag=9, frozen=True):
    """Request to one peer: may the sender do this, alone, for `ttl_s`?"""

    what: str
    ttl_s: Finite


class ClaimAnswered(_Message, tag=10, frozen=True):
    """To one."""

    what: str
    granted: bool


Message = Batch | Heartbeat | Hello | Bye | Ask | PeerSnapshot | StateRequest | StateChunk | ClaimAsked | ClaimAnswered

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_delta_decoder = msgspec.msgpack.Decoder(list[Delta])


def encode(message: Message) -> bytes:
    """As bytes."""
    return _encoder.encode(message)


def encode_batch(batch: Batch) -> tuple[bytes, int]:
    """Encode a batch, and return how many deltas were left out since they cannot be encoded: a number is too large, or
    a text no UTF-8."""
    try:
        return encode(batch), 0
    except (ValueError, OverflowError) as error:
        log.warning("dropping sync message: cannot encode %s", type(error).__name__)
    said = [delta for delta in batch.deltas if _can_be_said(delta)]
    return encode(msgspec.structs.replace(batch, deltas=said)), len(batch.deltas) - len(said)


def _can_be_said(delta: Delta) -> bool:
    try:
        _encoder.encode(delta)
    except (ValueError, OverflowError):
        return False
    return True


def decode(data: bytes) -> Message:
    """Raise msgspec.DecodeError for anything else."""
    if len(data) > 2 * MAX_BYTES:
        raise msgspec.DecodeError("too large")
    try:
        message: Message = _decoder.decode(data)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("a text is not UTF-8") from None
    return message


def encode_deltas(said: list[Delta]) -> bytes:
    """Without a message around them."""
    return _encoder.encode(said)


def decode_deltas(data: bytes) -> list[Delta]:
    """Raise msgspec.DecodeError for anything else."""
    try:
        said: list[Delta] = _delta_decoder.decode(data)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("a text is not UTF-8") from None
    return said


def topic(name: str) -> str:
    """Where proxies of one fleet that understand each other meet."""
    return f"kvproxy.{name}.{VERSION}.{fingerprint():016x}"
