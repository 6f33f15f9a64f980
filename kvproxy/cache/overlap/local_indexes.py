"""Overlap of one cluster's endpoints by local data: no I/O, no waiting, microseconds."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import Clock, EndpointId, InferenceRequest, RequestKind, Tier, cut_lower
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.feedback.reuse_step import ReuseSteps
from kvproxy.cache.feedback.trust import MissedReuses, Trust
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.capacity import Capacities
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Heat, Run
from kvproxy.cache.indexes.precise import PreciseIndex, PreciseMatch, precise_root
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.media.cut import Medium, cut_prompt
from kvproxy.cache.media.mixed import MixedPrompt
from kvproxy.cache.overlap.denied import EVERY_ENDPOINT, Denials, DeniedPlacements, believed_tokens
from kvproxy.cache.overlap.last_served import LastServed, RequestNames
from kvproxy.cache.overlap.merge import BEYOND, NOTHING, HolderOverlap, is_contradicted, merge_overlaps
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, message_chain, root_seed, text_blocks, token_blocks
from kvproxy.cache.prefix.prompt_identity import RULED, prompt_identity
from kvproxy.cache.prefix.session_hashes import PromptText, SessionHashes
from kvproxy.cache.prefix.token_memory import HashedTokens
from kvproxy.cluster.routing.policy import FactSource, Overlap

#: Blocks of text an endpoint is assumed to hold until its engine reports its capacity (64 MiB of prompts).
DEFAULT_CAPACITY_BLOCKS = 262_144
#: LoRA adapters distinguished from base models.
MAX_LORAS = 1024


#: Hashing all of a shorter prompt takes less than finding the part known from an earlier turn of its chat.
SHORT_BYTES = 4096

#: An engine's start time is the same in every reading, but for the rounding of clocks.
_SAME_START_S = 2.0

#: Tokens that the last block of a known beginning may have too few to be announced.
_LARGEST_BLOCK = 64

_EVENTS = frozenset({FactSource.PRECISE})
#: Sources of LMCache.
LOOKUPS = frozenset({FactSource.LMCACHE_CONTROLLER, FactSource.LMCACHE_COORDINATOR})

#: Models and cache salts whose chains were begun recently; salts come from clients.
_REMEMBERED_SEEDS = 1024


def _seed(model: str, cache_salt: str | None) -> int:
    return root_seed(block_size=TEXT_BLOCK_BYTES, model=model, cache_salt=cache_salt)


class FollowedEvents:
    """Data from KV events of one cluster; it lives as long as the streams that feed it."""

    def __init__(self) -> None:
        self.precise = PreciseIndex()
        self.exact: set[EndpointId] = set()  # endpoints with complete event streams
        self.loras: BoundedMapping[str, None] = BoundedMapping(MAX_LORAS)  # adapters that events spoke of
        self.paired: set[EndpointId] = set()  # endpoints whose events name pairs of tokens
        self.any = True  # whether an engine of the cluster publishes; until one does, no data is kept for its events
        #: Called with an endpoint whose live events report a dropped cache.
        self.on_cleared: Callable[[EndpointId], None] = lambda endpoint: None


class IndexWatch(Protocol):
    """Observer of one cluster's indexes, called in the order of their changes."""

    def routed(self, entry: SpeculativeEntry) -> None: ...

    def reused(self, entry: SpeculativeEntry, blocks: int) -> None: ...

    def contradicted(self, endpoint: EndpointId, cursor: PrefixCursor[Run], blocks: int) -> None: ...

    def settled(self, entry: SpeculativeEntry, *, prefilled: bool, lost: bool) -> None: ...

    def entered(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None: ...

    def process_started(self, endpoint: EndpointId, started_at: float) -> None: ...


class IndexState:
    """Data from routing and responses in one cluster; it outlives a reload."""

    def __init__(self, *, endpoints: int = 1, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self.hot = Heat(endpoints=endpoints)
        self.approximate = ApproximateIndex(capacity_blocks=capacity_blocks, heat=self.hot)
        self.capacities = Capacities(self.approximate)
        self.trust = Trust()  # in claims of KV events
        self.lookup_trust = Trust()  # in claims of LMCache
        self.missed = MissedReuses()  # by complete KV events
        self.steps = ReuseSteps()
        self.started_at: dict[EndpointId, float] = {}  # when each engine's process began, by its own clock
        self.sessions = SessionHashes()
        self.drops_header = True  # the engines leave a billing header out of prompts; not so where all are SGLang
        self.last_served = LastServed()
        self.watch: IndexWatch | None = None


class LocalIndexes:
    """The approximate index, fed by what was routed; the precise index, fed by KV events; and the heat of blocks.

    `exact` names the endpoints whose event streams miss nothing. With `follows_events`, and an engine that publishes,
    the approximate index also keeps which requests are under way; with `lookups` there is a service whose word is put
    to the test; with `keyed` prompts are known by the keys of their messages in any case. Two of them may share one
    `state`, and what is `followed`.
    """

    def __init__(
        self,
        state: IndexState,
        followed: FollowedEvents | None = None,
        *,
        learn_capacity: bool = True,
        follows_events: bool = True,
        lookups: bool = True,
        keyed: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.state = state
        self.approximate = state.approximate
        self.capacities = state.capacities
        self.hot = state.hot
        self.trust = state.trust
        self.lookup_trust = state.lookup_trust
        self.missed = state.missed
        self.started_at = state.started_at
        self.sessions = state.sessions
        self.steps = state.steps
        self.last_served = state.last_served
        self.store_readers: Callable[[], Iterable[EndpointId]] = tuple  # of what engines report in a shared store
        self.denied = DeniedPlacements(clock)  # by what engines reused
        self._lookups = lookups
        self._keyed = lookups or keyed  # these identify prompts by their messages' keys, as KV events do
        followed = FollowedEvents() if followed is None else followed
        if not follows_events:
            followed = FollowedEvents()
            followed.any = False
        self.followed = followed
        self.precise = followed.precise
        self.loras = followed.loras
        self.exact: Collection[EndpointId] = followed.exact
        self.capacities.learning = learn_capacity
        self._seed = lru_cache(_REMEMBERED_SEEDS)(_seed)
        self._precise_root = lru_cache(_REMEMBERED_SEEDS)(precise_root)

    def hash_prompt(
        self, request: InferenceRequest, model: str
    ) -> tuple[array[int], Sequence[int], int, PromptText | None, tuple[Medium, ...]]:
        """Return the prompt's text blocks, empty for a prompt shorter than one, a key for each message prefix, shortest
        first, the bytes of all of it, a conversation's text by message, as they name it (`prompt_identity`), and its
        media, in whose place stand-ins are hashed and counted. Of a short one there are keys only where something goes
        by them. Blocks and keys are not to be changed.
        """
        seed = self._seed(model, request.cache_salt)
        prompt = request.prompt
        kind = request.kind
        drops_header = self.state.drops_header
        size_bytes = prompt.size_bytes
        short = size_bytes <= SHORT_BYTES and not self._keyed and not self.followed.any
        if kind in RULED and not short:
            hashes, keys, prompt_bytes, told = self.sessions.identified(kind, prompt, seed, drops_header=drops_header)
            return hashes, keys, prompt_bytes, told, () if told is None else told.media
        prompt, media = cut_prompt(prompt, self.sessions.signatures)
        prompt = prompt_identity(kind, prompt, drops_header=drops_header)
        if prompt is not request.prompt:
            size_bytes = prompt.size_bytes
        keys = () if short else message_chain(prompt, seed)
        if not keys:
            return text_blocks(prompt, seed), (), size_bytes, None, media
        text = PromptText.of_prompt(prompt)
        prompt_bytes = text.size - 1 - text.parts + prompt.unread_bytes  # without the end mark of the parts
        told = text if kind is RequestKind.RESPONSES else None
        return self.sessions.blocks_of(text, seed, keys), keys, prompt_bytes, told, media

    def note_kinds(self, kinds: Collection[EngineKind]) -> None:
        """Note the kinds of the cluster's engines: they agree on most of a prompt's identity, but not on all."""
        self.state.drops_header = set(kinds) != {EngineKind.SGLANG}

    def name_request(self, request: InferenceRequest, model: str, tenant: str) -> RequestNames:
        """Return the hashed identifiers of a request's session and of the response that it continues."""
        return RequestNames.name_request(request, self._seed(model, request.cache_salt), tenant)

    def hash_ahead(self, hashed: HashedTokens, *, model: str, cache_salt: str | None) -> None:
        """Hash these tokens for the precise index now, while no request waits for it."""
        lora = model if self.loras and model in self.loras else ""
        for size in self.precise.block_sizes:
            hashed.blocks(size, self._precise_root(size, lora=lora, cache_salt=cache_salt))

    def find_overlaps(
        self,
        cursor: PrefixCursor[Run],
        *,
        bytes_per_token: float,
        tokens: TokenIds | None,
        hashed: HashedTokens | None = None,
        model: str = "",
        cache_salt: str | None,
        looked_up: Sequence[HolderOverlap] = (),
        prompt_tokens: int = 0,
        mixed: MixedPrompt | None = None,
    ) -> dict[EndpointId, Overlap]:
        """Return leading tokens by endpoint. `tokens` (or a known prefix of them) are also looked up in the precise
        index; `hashed` begins with them. `looked_up` is a lookup service's answer about this prompt of `prompt_tokens`.
        `mixed`: it has media, and `tokens` end in front of the first."""
        in_flight: Mapping[EndpointId, int] = NOTHING
        announced = None
        exact = self.exact
        if tokens is not None and self.followed.any:
            blocks = self._blocks_of(tokens, hashed, model, cache_salt)
            announced = self.precise.match_prompt(blocks)
            stored = self.precise.match_store(blocks)
            if self.denied and (denials := self.denied.find_denials(cursor.hashes)):
                announced = {one: _undenied(one, match, denials) for one, match in announced.items()}
                stored = believed_tokens(EVERY_ENDPOINT, ((Tier.SHARED, stored),), denials)
            if stored:
                looked_up = [*looked_up, *self._in_store(stored)]
            if self.missed.doubted:
                exact = frozenset(exact).difference(self.missed.doubted)
            if exact:
                in_flight = self.approximate.lookup_in_flight(cursor)
            if mixed is not None:
                exact = _without_confirmed(exact, announced, len(tokens))
        routed = self.approximate.lookup(cursor)
        tokens_per_block = TEXT_BLOCK_BYTES / bytes_per_token
        if mixed is not None:
            routed, in_flight = (_in_tokens(found, mixed, prompt_tokens) for found in (routed, in_flight))
            tokens_per_block = 1.0
        return merge_overlaps(
            routed=routed,
            in_flight=in_flight,
            tokens_per_block=tokens_per_block,
            announced=announced,
            exact=exact,
            trust=self.trust,
            looked_up=looked_up,
            lookup_trust=self.lookup_trust,
            steps=self.steps.known,
            prompt_tokens=prompt_tokens,
        )

    def _in_store(self, tokens: int) -> list[HolderOverlap]:
        """Return overlaps in a shared store, which count for every endpoint that reads it, whichever engine reported
        them."""
        lower = ((Tier.SHARED, tokens),)
        return [HolderOverlap(each, tokens, True, FactSource.PRECISE, lower) for each in self.store_readers()]

    def _blocks_of(
        self, tokens: TokenIds, hashed: HashedTokens | None, model: str, cache_salt: str | None
    ) -> Callable[[int], array[int]]:
        """Return a function from block size to block hashes; the same tokens under a LoRA are other blocks, and a
        model's name is a LoRA's if events call one so."""
        lora = model if self.loras and model in self.loras else ""

        def blocks(size: int) -> array[int]:
            root = self._precise_root(size, lora=lora, cache_salt=cache_salt)
            if hashed is None:
                return token_blocks(tokens, size, root)
            return hashed.leading_blocks(size, root, len(tokens))

        return blocks

    def route(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> SpeculativeEntry:
        """Route a request to the endpoint: it counts as holding the prompt until the entry is settled."""
        entry = self.approximate.route(endpoint, cursor, in_flight=self.followed.any)
        if (watch := self.state.watch) is not None:
            watch.routed(entry)
        return entry

    def enter_prompt(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None:
        """Enter a prompt that the endpoint served for another proxy."""
        self.approximate.insert(endpoint, cursor)
        if (watch := self.state.watch) is not None:
            watch.entered(endpoint, cursor)

    def settle_entry(self, entry: SpeculativeEntry, *, prefilled: bool, lost: bool = False) -> None:
        """Settle the entry of a finished request; `prefilled` is True if the engine got as far as a first byte. Once
        per entry. An engine that `lost` its cache still has the prompt it just prefilled."""
        if (watch := self.state.watch) is not None:
            watch.settled(entry, prefilled=prefilled, lost=lost)
        (self.approximate.confirm if prefilled else self.approximate.rollback)(entry)
        if lost:
            self.approximate.insert(entry.endpoint, entry.cursor)

    def observe_capacity(
        self, entry: SpeculativeEntry, overlap: Overlap | None, *, cached_tokens: int, cached_blocks: int
    ) -> bool:
        """Learn the endpoint's capacity from a response, before the entry is settled; True when the engine lost its
        whole cache. Complete KV events are more accurate. An engine that reused the whole steps of its held tokens lost
        nothing; if it holds less than one step there is no evidence."""
        if entry.endpoint in self.exact and entry.endpoint not in self.missed.doubted:
            return False
        if overlap is not None and overlap.held_tokens and not is_contradicted(overlap.tokens, cached_tokens):
            if not cached_tokens:
                return False
            cached_blocks = max(cached_blocks, len(entry.hashes) - entry.new_blocks)
        if (watch := self.state.watch) is not None:
            watch.reused(entry, cached_blocks)
        return self.capacities.observe_reuse(entry, cached_blocks)

    def correct_prediction(
        self,
        endpoint: EndpointId,
        cursor: PrefixCursor[Run],
        overlap: Overlap | None,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        cached_blocks: int,
        held_tokens: int = 0,
        known_tokens: int = 0,
    ) -> bool:
        """Learn from an engine's reuse of `cached_tokens`, which are `cached_blocks` of these blocks, after `overlap`
        had been predicted; returns True if that contradicts the prediction. A contradicted prefix leaves the index at
        once, since it would mislead further requests. `held_tokens` is its estimated content, reused or not; 0: the
        engine's step is known. KV events were searched for its first `known_tokens`."""
        if held_tokens:
            self.steps.observe_reuse(
                endpoint, held_tokens=held_tokens, cached_tokens=cached_tokens, blocks=cursor.hashes
            )
        if self.followed.any:
            _test(self.trust, endpoint, _EVENTS, overlap, cached_tokens)
            if known_tokens and endpoint in self.exact:
                self._test_events(endpoint, overlap, min(cached_tokens, known_tokens))
        if self._lookups:
            _test(self.lookup_trust, endpoint, LOOKUPS, overlap, cached_tokens)
        contradicted = overlap is not None and is_contradicted(predicted_tokens, cached_tokens)
        if contradicted:
            if (watch := self.state.watch) is not None:
                watch.contradicted(endpoint, cursor, cached_blocks)
            self.approximate.contradict(endpoint, cursor, cached_blocks)
        return contradicted

    def _test_events(self, endpoint: EndpointId, overlap: Overlap | None, reused_tokens: int) -> None:
        """Test a complete stream. Tokens promised by a request in flight could not be in its events yet."""
        announced = 0 if overlap is None else overlap.claimed_tokens
        if overlap is not None and endpoint not in self.missed.doubted:
            announced = max(announced, overlap.tokens)
        self.missed.observe_reuse(endpoint, announced_tokens=announced, reused_tokens=reused_tokens)

    def process_started(self, endpoint: EndpointId, started_at: float) -> bool:
        """Compare the start time in the engine's report with the last one; returns True for a new process, which holds
        nothing.

        Only a later start counts: behind one address there may be several engines that answer in turn."""
        before = self.started_at.get(endpoint)
        if before is not None and started_at <= before + _SAME_START_S:
            return False
        if before is not None:
            self.reset_endpoint(endpoint)
        self.started_at[endpoint] = started_at
        if (watch := self.state.watch) is not None:
            watch.process_started(endpoint, started_at)
        return before is not None

    def forget_endpoint(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left, or whose id another engine took: nothing routed there counts. (Its events are
        handled separately.)"""
        self.started_at.pop(endpoint, None)
        self.steps.forget_endpoint(endpoint)
        self.missed.forget_endpoint(endpoint)
        self.last_served.forget_cache(endpoint)
        self.approximate.remove(endpoint)
        self.capacities.forget_endpoint(endpoint)
        for trust in (self.trust, self.lookup_trust):
            trust.forget_endpoint(endpoint)

    def reset_endpoint(self, endpoint: EndpointId) -> None:
        """Reset an engine that restarted or dropped its cache: it holds nothing; its capacity stays."""
        self.approximate.clear(endpoint)
        self.missed.forget_endpoint(endpoint)
        self.last_served.forget_cache(endpoint)
        for trust in (self.trust, self.lookup_trust):
            trust.forget_endpoint(endpoint)


def _test(
    trust: Trust, endpoint: EndpointId, sources: Collection[FactSource], overlap: Overlap | None, cached_tokens: int
) -> None:
    """Put what one of the sources claimed to the test; where none did, a response makes earlier tests older."""
    if overlap is not None and overlap.source in sources:
        trust.observe_claim(endpoint, overlap.claimed_tokens, overlap.backed_tokens, cached_tokens)
    else:
        trust.observe_claim(endpoint, 0, 0, cached_tokens)


def _without_confirmed(
    exact: Collection[EndpointId], announced: Mapping[EndpointId, PreciseMatch], tokens: int
) -> frozenset[EndpointId]:
    """Return the endpoints without those whose events confirm all `tokens` in front of the first medium. Of what is
    behind it the events cannot be asked, so there counts what was routed."""
    confirmed = {endpoint for endpoint, match in announced.items() if match.tokens + _LARGEST_BLOCK > tokens}
    return frozenset(exact) - confirmed


def _in_tokens(blocks: Mapping[EndpointId, int], mixed: MixedPrompt, prompt_tokens: int) -> dict[EndpointId, int]:
    """Leading blocks of text as tokens; behind the last block that is held, part of the next one is, or of the rest."""
    beyond = int(BEYOND * TEXT_BLOCK_BYTES)
    return {
        endpoint: min(mixed.tokens_matched(count * TEXT_BLOCK_BYTES, beyond), prompt_tokens)
        for endpoint, count in blocks.items()
    }


def _undenied(endpoint: EndpointId, match: PreciseMatch, denials: Denials) -> PreciseMatch:
    """Reduce a match by denials: placements beyond memory are hints, as a lookup's are, since their deletion is not
    reported."""
    if not match.lower:
        return match
    held = ((Tier.DEVICE, match.device_tokens), *match.lower)
    beyond = believed_tokens(endpoint, held, denials) - match.device_tokens
    return PreciseMatch(match.device_tokens, cut_lower(match.lower, beyond), match.dp_rank)
