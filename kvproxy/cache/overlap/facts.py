"""Facts of the kvcache service about one request, from its arrival to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from kvproxy.base.types import EndpointId, InferenceRequest
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.media.cut import Medium
from kvproxy.cache.media.mixed import MixedPrompt
from kvproxy.cache.overlap.last_served import NO_NAMES, RequestNames
from kvproxy.cache.overlap.local_indexes import LocalIndexes, searched_tokens
from kvproxy.cache.overlap.media_reports import ReportedBeginning
from kvproxy.cache.overlap.merge import HolderOverlap, preferred_endpoint
from kvproxy.cache.prefix.session_hashes import PromptText
from kvproxy.cache.prefix.token_memory import HashedTokens
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import NO_FACTS, OverlapFacts


class RequestFacts(msgspec.Struct):
    """Handed from `gather` to `placed` to `finished`; its caller reads `overlaps` and `preferred` alone. (A struct: one
    is made in C.)"""

    cluster: Cluster
    indexes: LocalIndexes
    request: InferenceRequest
    body: bytes  # as the client sent it
    model: str  # as the engines call it
    cursor: PrefixCursor[Run]  # of the prompt's text blocks in the approximate index
    keys: Sequence[int]  # one a message prefix, shortest first
    prompt_bytes: int
    text_bytes: int  # of these, without its media
    started_at: float
    min_tokens: int  # that the preferred endpoint holds
    text: PromptText | None = None  # of a conversation, by message; None: of other APIs and short prompts
    names: RequestNames = NO_NAMES  # of its session and of the response that it continues
    media: tuple[Medium, ...] = ()  # whose stand-ins were hashed
    mixed: MixedPrompt | None = None  # of a prompt with media: its text and media in tokens
    reported: ReportedBeginning | None = None  # of a prompt with media: its leading blocks by engines' names
    noted: int = 0  # events with media until a prompt with media was routed
    overlaps: OverlapFacts = NO_FACTS
    tokens: TokenIds | None = None  # of the prompt, or of its longest known beginning
    hashed_tokens: HashedTokens | None = None  # begins with these tokens
    tokens_exact: bool = False  # of the whole prompt
    tokens_bytes: int = 0  # bytes of the prompt covered by `tokens`
    counted_tokens: int | None = None  # by the engine, once it answered
    wants_lookup: bool = False  # a lookup service can still be queried
    lookup_overlaps: Sequence[HolderOverlap] = ()  # by a lookup that answered in time
    holders_found: int | None = None  # by a lookup that answered in time
    entry: SpeculativeEntry | None = None  # entry in the approximate index

    @property
    def searched_tokens(self) -> int:
        """Leading tokens that KV events are searched for."""
        return searched_tokens(self.tokens, self.reported)

    @property
    def hashes(self) -> array[int]:
        """Of the prompt's text blocks. Not to be changed."""
        return self.cursor.hashes

    @property
    def preferred(self) -> EndpointId | None:
        """Endpoint that holds most. Computed on demand: most policies do not use it."""
        endpoints = self.cluster.endpoints
        return preferred_endpoint(self.overlaps, endpoints, model=self.model, min_tokens=self.min_tokens)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Endpoints that serve the model, in the cluster's order."""
        return tuple([endpoint for endpoint in self.cluster.endpoints if endpoint.serves(self.model)])


class Result(msgspec.Struct):
    """How a request went, by its engine's own count where it gave one."""

    endpoint: EndpointId | None
    prefilled: bool  # a first byte of a good answer came
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    media_tokens: int | None = None  # of the prompt's
    completion_tokens: int | None = None
    calls_tool: bool = True  # the answer does, or that is not known
    response_id: str = ""  # by which another request may go on from this one
    request_id: str = ""
    tenant: str = ""
    notes: dict[str, object] = {}  # of features on its outcome
    prefill_endpoint: EndpointId | None = None  # that computed the prompt and counted its cached tokens, if another did
