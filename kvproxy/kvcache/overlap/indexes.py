"""What one cluster's endpoints hold by our own knowledge: no I/O, no waiting, microseconds."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from cachetools import LRUCache

from kvproxy.clients.tokens import TokenIds
from kvproxy.kvcache.overlap.merge import is_contradicted, local_overlaps
from kvproxy.prefix.approximate.capacities import Capacities
from kvproxy.prefix.approximate.endpoint_lru import Run, SpeculativeEntry
from kvproxy.prefix.approximate.heat import Heat
from kvproxy.prefix.approximate.index import ApproximateIndex
from kvproxy.prefix.approximate.radix import PrefixCursor
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES, message_chain, root_seed, token_blocks
from kvproxy.prefix.precise.index import PreciseIndex, PreciseMatch, precise_root
from kvproxy.prefix.tokens.hashed_tokens import HashedTokens
from kvproxy.prefix.tokens.session_hashes import SessionHashes
from kvproxy.routing.policy import FactSource, Overlap
from kvproxy.routing.trust import Trust
from kvproxy.types import EndpointId, InferenceRequest

#: Blocks of text an endpoint is believed to hold until its engine says how much fits (64 MiB of prompts).
DEFAULT_CAPACITY_BLOCKS = 262_144
#: LoRA adapters told from base models.
MAX_LORAS = 1024


#: An engine's start time is the same in every reading, but for the rounding of clocks.
_SAME_START_S = 2.0

#: What speaks for LMCache.
LOOKUPS = frozenset({FactSource.LMCACHE_CONTROLLER, FactSource.LMCACHE_COORDINATOR})

#: Models and cache salts whose chains were begun of late; salts come from clients.
_REMEMBERED_SEEDS = 1024


def _seed(model: str, cache_salt: str | None) -> int:
    return root_seed(block_size=TEXT_BLOCK_BYTES, model=model, cache_salt=cache_salt)


class LocalIndexes:
    """The approximate index, fed by what was routed; the precise index, fed by KV events; and the heat of blocks.

    `exact` names the endpoints whose event streams miss nothing. While events are followed, the approximate index also
    keeps whose requests are under way. Made after `former`, it shares with it what was routed where, heat and trust;
    events it follows anew.
    """

    def __init__(
        self,
        *,
        endpoints: int,
        learn_capacity: bool = True,
        capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS,
        former: LocalIndexes | None = None,
    ) -> None:
        self.precise = PreciseIndex()
        self.exact: Collection[EndpointId] = frozenset()
        self.loras: LRUCache[str, None] = LRUCache(MAX_LORAS)  # adapters that events spoke of
        if former is None:
            self.hot = Heat(endpoints=endpoints)
            self.approximate = ApproximateIndex(capacity_blocks=capacity_blocks, heat=self.hot)
            self.capacities = Capacities(self.approximate)
            self.trust, self.lookup_trust = Trust(), Trust()  # in what KV events say, and in what LMCache says
            self.started_at: dict[EndpointId, float] = {}  # when each engine's process began, by its own clock
            self.sessions = SessionHashes()
        else:
            self.approximate, self.capacities, self.hot = former.approximate, former.capacities, former.hot
            self.trust, self.lookup_trust = former.trust, former.lookup_trust
            self.started_at, self.sessions = former.started_at, former.sessions
        self.capacities.learning = learn_capacity
        self._seed = lru_cache(_REMEMBERED_SEEDS)(_seed)
        self._precise_root = lru_cache(_REMEMBERED_SEEDS)(precise_root)

    def hashes(self, request: InferenceRequest, model: str) -> tuple[array[int], Sequence[int]]:
        """The prompt's text blocks, empty for a prompt shorter than one, and a key for each message prefix, shortest
        first. Neither is to be changed.
        """
        seed, prompt = self._seed(model, request.cache_salt), request.prompt
        keys = message_chain(prompt, seed)
        return self.sessions.text_blocks(prompt, seed, keys), keys

    def prepare(self, hashed: HashedTokens, *, model: str, cache_salt: str | None) -> None:
        """Hash these tokens for the precise index now, when nobody waits for it."""
        lora = model if self.loras and model in self.loras else ""
        for size in self.precise.block_sizes:
            hashed.blocks(size, self._precise_root(size, lora=lora, cache_salt=cache_salt))

    def overlaps(
        self,
        cursor: PrefixCursor[Run],
        *,
        bytes_per_token: float,
        tokens: TokenIds | None,
        hashed: HashedTokens | None = None,
        model: str = "",
        cache_salt: str | None,
    ) -> dict[EndpointId, Overlap]:
        """Leading tokens by endpoint. `tokens` (or as much of them as is known) also asks the precise index; `hashed`
        begins with them.
        """
        scale = TEXT_BLOCK_BYTES / bytes_per_token
        routed = {endpoint: int(blocks * scale) for endpoint, blocks in self.approximate.lookup(cursor).items()}
        if tokens is None or not self._follows_events:
            return {endpoint: Overlap(held) for endpoint, held in routed.items()}
        promised = self.approximate.lookup_in_flight(cursor) if self.exact else {}
        return local_overlaps(
            routed=routed,
            in_flight={endpoint: int(blocks * scale) for endpoint, blocks in promised.items()},
            announced=self._announced(tokens, hashed, model, cache_salt),
            exact=self.exact,
            trust=self.trust,
        )

    @property
    def _follows_events(self) -> bool:
        return bool(self.exact or self.precise.block_sizes)

    def _announced(
        self, tokens: TokenIds, hashed: HashedTokens | None, model: str, cache_salt: str | None
    ) -> Mapping[EndpointId, PreciseMatch]:
        """The same tokens under a LoRA are other blocks; a model's name is a LoRA's if events call one so."""
        lora = model if self.loras and model in self.loras else ""

        def blocks(size: int) -> array[int]:
            root = self._precise_root(size, lora=lora, cache_salt=cache_salt)
            if hashed is None:
                return token_blocks(tokens, size, root)
            return hashed.leading_blocks(size, root, len(tokens))

        return self.precise.lookup(blocks)

    def route(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> SpeculativeEntry:
        """A request goes there: it counts as holding the prompt until the claim is settled."""
        return self.approximate.route(endpoint, cursor, in_flight=self._follows_events)

    def settle(self, claim: SpeculativeEntry, *, prefilled: bool) -> None:
        """The request is over; `prefilled` says whether the engine got as far as a first byte. Once a claim."""
        (self.approximate.confirm if prefilled else self.approximate.rollback)(claim)

    def correct(
        self,
        endpoint: EndpointId,
        cursor: PrefixCursor[Run],
        overlap: Overlap | None,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        cached_blocks: int,
    ) -> bool:
        """The engine reused so many tokens, which are so many of these hashes, where `overlap` had been believed.
        Whether that contradicts the prediction; a contradicted prefix leaves the index at once, since believing it
        longer would send more requests astray.
        """
        source = None if overlap is None else overlap.source
        for trust, speaks in ((self.trust, source is FactSource.PRECISE), (self.lookup_trust, source in LOOKUPS)):
            claimed, backed = (overlap.claimed_tokens, overlap.backed_tokens) if overlap and speaks else (0, 0)
            trust.observe(endpoint, claimed, backed, cached_tokens)
        contradicted = overlap is not None and is_contradicted(predicted_tokens, cached_tokens)
        if contradicted:
            self.approximate.contradict(endpoint, cursor, cached_blocks)
        return contradicted

    def began(self, endpoint: EndpointId, started_at: float) -> bool:
        """The engine says when its process began. Whether that is another process than before, which holds nothing.

        Only a later start counts: behind one address there may be several engines that answer in turn.
        """
        before = self.started_at.get(endpoint)
        if before is not None and started_at <= before + _SAME_START_S:
            return False
        if before is not None:
            self.lose(endpoint)
        self.started_at[endpoint] = started_at
        return before is not None

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left, or another engine took its id: nothing that was routed there counts. (Its events are
        their own business.)"""
        self.started_at.pop(endpoint, None)
        self.approximate.remove(endpoint)
        self.capacities.forget(endpoint)
        for trust in (self.trust, self.lookup_trust):
            trust.forget(endpoint)

    def lose(self, endpoint: EndpointId) -> None:
        """The engine began anew: it holds nothing; its capacity is what it was."""
        self.approximate.clear(endpoint)
        for trust in (self.trust, self.lookup_trust):
            trust.forget(endpoint)
