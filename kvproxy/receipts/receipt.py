"""The format of a receipt, one JSON line each. Hashes and lengths, never text of a prompt.

What is left out has its default: 0, or unknown. Readers ignore fields they do not know, so that receipts of other
versions stay readable; `v` changes when the meaning of a field does.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvproxy.prefix.hygiene.causes import PrefixBreak
from kvproxy.routing.policy import Overlap
from kvproxy.routing.work import NO_WORK, Features
from kvproxy.types import EndpointId

VERSION = 1


class ReceiptCandidate(msgspec.Struct, omit_defaults=True):
    """An endpoint that could have taken the request, as it stood just before the decision."""

    id: EndpointId
    in_flight: int = 0
    pending_requests: int = 0  # without a first token
    pending_tokens: int = 0  # uncached ones of these
    resident_tokens: int = 0
    work: Features = NO_WORK  # pending prefill: requests, uncached tokens, attention work, lower-tier tokens
    head: Features = NO_WORK  # of it, what the engine was at work on
    elapsed_s: float = 0.0  # since its latest first token
    weight: float = 1.0
    cost: float | None = None  # by the policy, in its own unit
    slowness: float | None = None  # learned, against the pool
    wait_s: float | None = None  # estimated, until it would begin
    held_s: float = 0.0  # pooled prefill seconds of what the router queue held for it
    live_blocks: int | None = None  # distinct prompt blocks of what is in flight, where they are counted
    shared_blocks: int = 0  # leading blocks of this prompt among them
    room_s: float = 0.0  # of `wait_s`: until there is KV memory, or a slot, for one more request
    adapter_s: float | None = None  # until its adapter is loaded there; None: it asked for none


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One placement."""

    at_s: float  # since the request was received
    endpoint: EndpointId
    policy: str
    reason: str
    candidates: tuple[ReceiptCandidate, ...]
    left_out: int = 0  # candidates beyond those recorded
    preference: str | None = None  # what became of a preferred endpoint
    seconds: Features | None = None  # the pool's learned time for one unit of each kind of work
    failure: str | None = None  # why it failed, if that was before anything was sent to the client


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request from its receipt to its end. None: unknown. Times are seconds since it was received."""

    time: str  # of its end, UTC
    request_id: str
    end: str
    duration_s: float
    v: int = VERSION
    kind: str = ""
    model: str = ""
    tenant: str = ""
    client: str = ""  # kind of client, one of a few; "": unknown
    session: str = ""  # keyed hash; equal within one run of the proxy
    parent: str = ""  # of the session that it was made from; likewise
    head: str = ""  # keyed hash of the prompt's first bytes; likewise
    stream: bool = False
    cluster: str = ""
    prompt_tokens: int | None = None  # known or estimated before the decision
    hot_tokens: int = 0
    prompt_blocks: int = 0  # of about `block_tokens` each
    block_tokens: float = 0.0
    prefixes: str = ""  # keyed hashes of the prompt's prefixes (prefixes.py); "": unknown, or not to be noted
    facts: Mapping[EndpointId, Overlap] = {}
    attempts: tuple[Attempt, ...] = ()
    refusals: tuple[str, ...] = ()  # why no endpoint could be picked, each time it was tried
    endpoint: EndpointId | None = None  # the one that answered, or failed last
    status: int = 0
    ttft_s: float | None = None
    engine_priority: int | None = None  # the number by which the engine was told to order it, in milliseconds
    engine_prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    cache_loss: str = ""  # how the endpoint had lost its cache less than a minute before: restarted, cleared, ...
    prefix_break: PrefixBreak | None = None  # what was computed again of its session's last prompt, and why


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Receipt)


def encode(receipt: Receipt) -> bytes:
    """Its line, newline included."""
    return _encoder.encode(receipt) + b"\n"


def decode(line: bytes) -> Receipt:
    """The receipt on a line; ValueError when it is none."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a receipt: {error}") from None
