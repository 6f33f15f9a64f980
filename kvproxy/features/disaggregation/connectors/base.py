"""The interface of connectors: what each leg carries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin

Members = Mapping[str, msgspec.Raw]


class NoHandle(Exception):
    """The prefill's answer has no parameters by which its KV could be pulled."""


class Engine(Protocol):
    """An endpoint, as connectors see it."""

    @property
    def origin(self) -> Origin: ...
    @property
    def authorization(self) -> bytes | None: ...
    @property
    def rank(self) -> int | None: ...


class Fetch(Protocol):
    """Asks an engine's host. Raises UpstreamError's kinds, and TimeoutError."""

    async def __call__(self, endpoint: Engine, port: int, path: str) -> bytes: ...


class EngineFacts(NamedTuple):
    """Facts about an engine that prefills, learned before its first leg."""

    block_tokens: int = 0  # tokens that a KV block holds; 0: not reported
    ids: Mapping[str, str] = MappingProxyType({})  # engine ids by rank


class LegTerms(NamedTuple):
    """Additions to the legs of one request: members of the prefill's body; the beginning of the decoder's, and its
    header fields."""

    prefill: Members
    decode: bytes = b""
    fields: Headers = []


class KvConnector:
    """One connector. A leg after the other, each prefill for one token, unless a subclass says otherwise."""

    #: Both legs go out at once.
    at_once = False
    #: The prefill leg is for one token; else its body is the client's.
    shortens = True
    #: The proxy sends the prefill leg; else the decoder's side does.
    sends_prefill = True
    #: Metrics of vLLM show that KV was pulled.
    counts_pulls = True
    #: Servers are started for one of the legs, and report which.
    has_modes = False
    #: A decoder takes requests without a prefill leg, and computes their prompts.
    computes_alone = True

    def __init__(self, port: int, rng: Random) -> None:
        self.port = port
        self.rng = rng
        self.facts: dict[Engine, EngineFacts] = {}

    async def prepare(self, prefill: Engine, fetch: Fetch, block_tokens: int) -> None:
        """Learn what legs need to know of an engine, before its first and after each change of its health."""

    def forget(self, endpoint: Engine) -> None:
        """Forget what was learned of an engine."""
        self.facts.pop(endpoint, None)

    def keep_only(self, endpoints: Collection[Engine]) -> None:
        """Forget engines that left."""
        for gone in self.facts.keys() - set(endpoints):
            del self.facts[gone]

    def begin(self, prefill: Engine) -> LegTerms:
        """Return the additions to the legs of one request. Raises NoHandle."""
        raise NotImplementedError

    def read_member(self, answer: bytes, prefill: Engine) -> bytes:
        """Return the beginning of the decoder's body by the engine's answer to the prefill. Raises NoHandle."""
        return b""


def raw(value: object) -> msgspec.Raw:
    """Return a member's value."""
    return msgspec.Raw(msgspec.json.encode(value))


def member_of(name: str, value: bytes) -> bytes:
    """Return the member as it stands in front of others."""
    return b'"%b":%b,' % (name.encode(), value)
