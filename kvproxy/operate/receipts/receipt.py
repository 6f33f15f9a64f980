"""Format of a receipt, one JSON line each, and the meaning of its numbers. Hashes and lengths, never text of a prompt.

A missing field has its default: 0, or unknown. Readers ignore unknown fields, so that receipts of other versions stay
readable; `v` changes when the meaning of a field does.

Keyed hashes of a prompt's blocks, at few depths, show the prefixes it shares with others. A block's chained hash names
the whole prefix it ends, so a few of them show how much two prompts share. Depths are close together at both ends of a
prompt and far apart between: where a shared prefix is missed, it is by at most a third of it, or of what follows it,
whichever is less. A prompt of a million blocks has some 200 depths."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from typing import TypeVar, cast

import msgspec

from kvproxy.base.installed import installed
from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Overlap
from kvproxy.cluster.routing.work import NO_WORK, Backlog, Features, features_of, seconds_of
from kvproxy.proxy.feature import ProxyFeature

VERSION = 1

N = TypeVar("N")


class ReceiptCandidate(msgspec.Struct, omit_defaults=True):
    """An endpoint that could have taken the request, as it stood just before the decision."""

    id: EndpointId
    in_flight: int = 0
    pending_requests: int = 0  # without a first token
    pending_tokens: int = 0  # uncached ones of these
    resident_tokens: int = 0
    work: Features = NO_WORK  # pending prefill: requests, uncached tokens, attention work, seconds of onboarding
    head: Features = NO_WORK  # the part of it that the engine worked on
    elapsed_s: float = 0.0  # since its latest first token
    weight: float = 1.0
    cost: float | None = None  # by the policy, in its own unit
    slowness: float | None = None  # learned, against the pool
    wait_s: float | None = None  # estimated, until it would begin
    live_blocks: int | None = None  # distinct prompt blocks in flight, if they are counted
    shared_blocks: int = 0  # leading blocks of this prompt among them
    onboarding_s: float = 0.0  # to load this prompt's blocks from lower tiers there
    adapter_s: float | None = None  # until its adapter is loaded there; None: no adapter


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One placement."""

    at_s: float  # since the request was received
    endpoint: EndpointId
    policy: str
    reason: str
    candidates: tuple[ReceiptCandidate, ...]
    left_out: int = 0  # candidates beyond those recorded
    preference: str | None = None  # outcome of a preference for an endpoint
    seconds: Features | None = None  # the pool's learned time for one unit of each kind of work
    failure: str | None = None  # why it failed, if nothing had been sent to the client


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request from its receipt to its end. None: unknown. Times are seconds since it was received.

    `receipt_type` has a field for each note of a feature as well; read it by `note_of`.
    """

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
    parent: str = ""  # of the parent session; likewise
    head: str = ""  # keyed hash of the prompt's first bytes; likewise
    stream: bool = False
    cluster: str = ""
    prompt_tokens: int | None = None  # known or estimated before the decision
    hot_tokens: int = 0
    prompt_blocks: int = 0  # of about `block_tokens` each
    block_tokens: float = 0.0
    prefixes: str = ""  # keyed hashes of the prompt's prefixes; "": unknown, or not recorded
    searched: bool = True  # False: what endpoints hold of the prompt was not looked for
    facts: Mapping[EndpointId, Overlap] = {}
    attempts: tuple[Attempt, ...] = ()
    refusals: tuple[str, ...] = ()  # why no endpoint could be picked, once per try
    endpoint: EndpointId | None = None  # the endpoint that answered, or failed last
    status: int = 0
    ttft_s: float | None = None
    engine_prompt_tokens: int | None = None
    engine_media_tokens: int | None = None  # of these: pictures, audio and video; None: not reported
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    cache_loss: str = ""  # how the endpoint had lost its cache less than a minute before: restarted, cleared, ...


_encoder = msgspec.json.Encoder()


@cache
def receipt_type() -> type[Receipt]:
    """Return the class of receipts with the notes of all installed features as fields."""
    notes = [
        (name, kind | None, None) for feature in installed(ProxyFeature) for name, kind in feature.list_notes().items()
    ]
    made = msgspec.defstruct(Receipt.__name__, notes, bases=(Receipt,), frozen=True, omit_defaults=True)
    return cast("type[Receipt]", made)


def note_of(receipt: Receipt, name: str, kind: type[N]) -> N | None:
    """Return the note of that name; None where the receipt has none."""
    found = getattr(receipt, name, None)
    return found if isinstance(found, kind) else None


@cache
def _decoder() -> msgspec.json.Decoder[Receipt]:
    return msgspec.json.Decoder(receipt_type())


def media_share(receipts: Iterable[Receipt]) -> float:
    """Return the share of the prompt tokens, as engines counted them, that are those of pictures, audio and video."""
    counts = [(one.engine_media_tokens or 0, one.engine_prompt_tokens or 0) for one in receipts]
    return sum(media for media, _ in counts) / max(1, sum(tokens for _, tokens in counts))


def describe_media(share: float) -> str:
    """Return the share of media for a summary of recorded requests; "" where there are none."""
    return f"{share:.0%} of their prompt tokens are those of pictures, audio or video" if share else ""


def encode_receipt(receipt: Receipt) -> bytes:
    """Its line, newline included."""
    return _encoder.encode(receipt) + b"\n"


def decode_receipt(line: bytes) -> Receipt:
    """Return the receipt on a line; ValueError when it is none."""
    try:
        return _decoder().decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a receipt: {error}") from None


def matched_tokens(receipt: Receipt, endpoint: EndpointId) -> int:
    """Leading tokens it was estimated to hold, never more than the prompt has."""
    held = receipt.facts.get(endpoint)
    return 0 if held is None else min(held.tokens, receipt.prompt_tokens or 0)


def own_work(receipt: Receipt, candidate: ReceiptCandidate) -> Features:
    """Return the prefill this request would add there."""
    matched = matched_tokens(receipt, candidate.id)
    return features_of((receipt.prompt_tokens or 0) - matched, matched, candidate.onboarding_s)


def first_token_s(receipt: Receipt, candidate: ReceiptCandidate, seconds: Features, slowness: float) -> float:
    """From the decision to the first token there, at these speeds."""
    return wait_s(candidate, seconds, slowness) + prefill_s(receipt, candidate, seconds, slowness)


def wait_s(candidate: ReceiptCandidate, seconds: Features, slowness: float) -> float:
    """Until it would begin."""
    if not candidate.pending_requests:
        return 0.0
    return Backlog(candidate.work, candidate.head, candidate.elapsed_s).wait_s(seconds, slowness)


def prefill_s(receipt: Receipt, candidate: ReceiptCandidate, seconds: Features, slowness: float) -> float:
    """Return the request's own prefill there."""
    return slowness * seconds_of(own_work(receipt, candidate), seconds)


#: Bytes of a hash: among ten million of them at one depth, fewer than fifty collide.
_BYTES = 5
#: Distance to the next depth, as a divisor of the distance to the nearer end of a prompt.
_SHARE = 4


@lru_cache(1024)
def prefix_depths(blocks: int) -> tuple[int, ...]:
    """Depths at which a prompt of so many blocks is named, its end included; multiples of powers of two, so that
    prompts of different lengths have them in common."""
    depths = []
    depth = 0
    while depth < blocks:
        near = min(depth, blocks - depth) // _SHARE
        step = 1 << max(0, near.bit_length() - 1)
        depth = (depth // step + 1) * step
        depths.append(depth)
    return tuple(depths)


def encode_prefixes(blocks: Sequence[int], *, key: bytes) -> str:
    """Return the hashes at the depths of a prompt with these blocks, under `key`: a prompt that is guessed cannot be
    recognised without it, and all processes that have it give it the same names."""
    keyed = blake2b(digest_size=_BYTES, key=key)
    hashes = []
    for depth in prefix_depths(len(blocks)):
        one = keyed.copy()  # half the time of making it anew
        one.update(blocks[depth - 1].to_bytes(8, "little"))
        hashes.append(one.digest())
    return b64encode(b"".join(hashes)).decode()


def decode_prefixes(blocks: int, text: str) -> list[tuple[int, bytes]]:
    """(depth in blocks, hash), the shallowest first; nothing where the two do not belong together."""
    try:
        data = b64decode(text, validate=True)
    except ValueError:
        return []
    depths = prefix_depths(blocks)
    if len(data) != _BYTES * len(depths):
        return []
    return [(depth, data[at : at + _BYTES]) for depth, at in zip(depths, range(0, len(data), _BYTES), strict=True)]
