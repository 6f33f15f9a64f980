"""Overlap of one cluster's endpoints by local data: no I/O, no waiting, microseconds."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from kvproxy.base.types import Clock, EndpointId, Tier, cut_lower
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.feedback.trust import MissedReuses, Trust
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.precise import precise_root
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.media.mixed import MixedPrompt
from kvproxy.cache.overlap.denied import EVERY_ENDPOINT, Denials, DeniedPlacements, trusted_tokens
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.last_served import NO_BLOCKS
from kvproxy.cache.overlap.media_reports import ReportedBeginning
from kvproxy.cache.overlap.merge import BEYOND, NOTHING, HolderOverlap, is_contradicted, merge_overlaps
from kvproxy.cache.overlap.prompt_hashes import REMEMBERED_SEEDS, PromptHashes
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, token_blocks
from kvproxy.cache.prefix.token_memory import HashedTokens
from kvproxy.cluster.routing.policy import APPROXIMATE, NO_FACTS, PRECISE, SESSION, Overlap, OverlapFacts

#: An engine's start time is the same in every reading, but for the rounding of clocks.
_SAME_START_S = 2.0

#: Tokens that the last block of a known beginning may have too few to be announced.
_LARGEST_BLOCK = 64

#: Sources beside lookups; None: there was no overlap.
_OTHERS = frozenset({None, APPROXIMATE, PRECISE, SESSION})


class LocalIndexes:
    """The approximate index, fed by what was routed; the precise index, fed by KV events; and the heat of blocks.

    `exact` names the endpoints whose event streams miss nothing. Where an engine's events are `followed`, the
    approximate index also keeps which requests are under way; with `lookups` there is a service whose word is put to
    the test; with `keyed` prompts are known by the keys of their messages in any case. Two of them may share one
    `state`, and what is `followed`.
    """

    def __init__(
        self,
        state: IndexState,
        followed: FollowedEvents | None = None,
        *,
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
        if followed is None:
            followed = FollowedEvents()
            followed.any = False
        self.followed = followed
        self.precise = followed.precise
        self.loras = followed.loras
        self.exact: Collection[EndpointId] = followed.exact
        #: Lookups identify prompts by their messages' keys, as KV events do.
        self.prompts = PromptHashes(state, followed, keyed=lookups or keyed)
        self._precise_root = lru_cache(REMEMBERED_SEEDS)(precise_root)

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
        reported: ReportedBeginning | None = None,
    ) -> dict[EndpointId, Overlap]:
        """Return leading tokens by endpoint. `tokens` (or a known prefix of them) are also looked up in the precise
        index; `hashed` begins with them. `looked_up` is a lookup service's answer about this prompt of `prompt_tokens`.
        `mixed`: it has media, `tokens` end in front of the first, and events may have `reported` its beginning."""
        in_flight: Mapping[EndpointId, int] = NOTHING
        announced = None
        exact = self.exact
        searched = (tokens is not None or reported is not None) and self.followed.any
        worth = _find_worth(bytes_per_token, mixed, prompt_tokens, partly=not searched)
        if searched:
            blocks = self.blocks_of(tokens, hashed, model, cache_salt, reported)
            announced = self.precise.match_prompt(blocks)
            stored = self.precise.match_store(blocks)
            if self.denied and (denials := self.denied.find_denials(cursor.hashes)):
                announced = {one: _undenied(one, match, denials) for one, match in announced.items()}
                stored = trusted_tokens(EVERY_ENDPOINT, ((Tier.SHARED, stored),), denials)
            if stored:
                # it counts for every endpoint that reads the store, whichever engine reported it
                lower = ((Tier.SHARED, stored),)
                readers = self.store_readers()
                found = [HolderOverlap(each, stored, True, PRECISE, lower) for each in readers]
                looked_up = [*looked_up, *found]
            if self.missed.doubted:
                exact = frozenset(exact).difference(self.missed.doubted)
            if exact:
                in_flight = self.approximate.lookup_in_flight(cursor, worth)
            if mixed is not None and not (reported is not None and reported.whole):
                exact = _without_confirmed(exact, announced, searched_tokens(tokens, reported))
        return merge_overlaps(
            routed=self.approximate.lookup(cursor, worth),
            in_flight=in_flight,
            announced=announced,
            exact=exact,
            trust=self.trust,
            looked_up=looked_up,
            lookup_trust=self.lookup_trust,
            steps=self.steps.known,
            prompt_tokens=prompt_tokens,
        )

    def blocks_of(
        self,
        tokens: TokenIds | None,
        hashed: HashedTokens | None,
        model: str,
        cache_salt: str | None,
        reported: ReportedBeginning | None = None,
    ) -> Callable[[int], array[int]]:
        """Return a function from block size to block hashes; the same tokens under a LoRA are other blocks, and a
        model's name is a LoRA's if events call one so."""
        lora = model if self.loras and model in self.loras else ""

        def blocks(size: int) -> array[int]:
            if tokens is None or (reported is not None and reported.tokens >= len(tokens)):
                return NO_BLOCKS if reported is None else reported.hashes
            root = self._precise_root(size, lora=lora, cache_salt=cache_salt)
            if hashed is None:
                return token_blocks(tokens, size, root)
            return hashed.leading_blocks(size, root, len(tokens))

        return blocks

    def route(
        self, endpoint: EndpointId, cursor: PrefixCursor[Run], facts: OverlapFacts = NO_FACTS
    ) -> SpeculativeEntry:
        """Route a request with these facts to the endpoint: it counts as holding the prompt until the entry is
        settled."""
        entry = self.approximate.route(endpoint, cursor, in_flight=self.followed.any)
        if (watch := self.state.watch) is not None:
            watch.routed(entry, facts)
        return entry

    def move_entry(self, entry: SpeculativeEntry, endpoint: EndpointId, *, kept: bool) -> SpeculativeEntry:
        """Move a request's entry to another endpoint: it is the same request. The earlier one has `kept` the prompt, or
        never computed it."""
        moved = self.approximate.move(entry, endpoint, kept=kept)
        if (watch := self.state.watch) is not None:
            watch.moved(moved, kept=kept)
        return moved

    def enter_prompt(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None:
        """Enter a prompt that the endpoint served for another proxy."""
        self.approximate.insert(endpoint, cursor)
        if (watch := self.state.watch) is not None:
            watch.entered(endpoint, cursor)

    def settle_entry(
        self,
        entry: SpeculativeEntry,
        *,
        prefilled: bool,
        lost: bool = False,
        ends: bool = False,
        calls_tool: bool = True,
    ) -> None:
        """Settle the entry of a finished request; `prefilled` is True if the engine got as far as a first byte. Once
        per entry. An engine that `lost` its cache still has the prompt it just prefilled. `ends`: its client ends the
        session with it; `calls_tool`: the answer does, or that is not known."""
        if (watch := self.state.watch) is not None:
            watch.settled(entry, prefilled=prefilled, lost=lost, ends=ends, calls_tool=calls_tool)
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
        source = None if overlap is None else overlap.source
        if self.followed.any:
            _test(self.trust, endpoint, overlap if source == PRECISE else None, cached_tokens)
            if known_tokens and endpoint in self.exact:
                _test_events(self.missed, endpoint, overlap, min(cached_tokens, known_tokens))
        if self._lookups:
            _test(self.lookup_trust, endpoint, overlap if source not in _OTHERS else None, cached_tokens)
        contradicted = overlap is not None and is_contradicted(predicted_tokens, cached_tokens)
        if contradicted:
            if (watch := self.state.watch) is not None:
                watch.contradicted(endpoint, cursor, cached_blocks)
            self.approximate.contradict(endpoint, cursor, cached_blocks)
        return contradicted

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

    def forget_cache(self, endpoint: EndpointId) -> None:
        """Forget all that an engine held which gave its cache up, whatever its events have reported."""
        self.reset_endpoint(endpoint)
        self.precise.remove_endpoint(endpoint)

    def reset_endpoint(self, endpoint: EndpointId) -> None:
        """Reset an engine that restarted or dropped its cache: it holds nothing; its capacity stays."""
        self.approximate.clear(endpoint)
        self.missed.forget_endpoint(endpoint)
        self.last_served.forget_cache(endpoint)
        for trust in (self.trust, self.lookup_trust):
            trust.forget_endpoint(endpoint)


def _find_worth(
    bytes_per_token: float, mixed: MixedPrompt | None, prompt_tokens: int, *, partly: bool
) -> Callable[[int], int]:
    """Return a function from leading blocks of text to their tokens. Behind the last block that is held, part of
    the next one is, or of the rest: `partly` counts that where no events do."""
    tokens_per_block = TEXT_BLOCK_BYTES / bytes_per_token
    beyond = BEYOND * tokens_per_block if partly else 0.0

    def find_tokens(blocks: int) -> int:
        tokens = blocks * tokens_per_block
        return int(tokens + beyond if tokens + tokens_per_block <= prompt_tokens else tokens)

    def find_mixed(blocks: int) -> int:
        assert mixed is not None
        within = int(BEYOND * TEXT_BLOCK_BYTES)
        return min(mixed.tokens_matched(blocks * TEXT_BLOCK_BYTES, within), prompt_tokens)

    return find_tokens if mixed is None else find_mixed


def _test(trust: Trust, endpoint: EndpointId, overlap: Overlap | None, cached_tokens: int) -> None:
    """Put what the source claimed to the test; where it claimed nothing, a response makes earlier tests older."""
    claimed, backed = (0, 0) if overlap is None else (overlap.claimed_tokens, overlap.backed_tokens)
    trust.observe_claim(endpoint, claimed, backed, cached_tokens)


def _test_events(missed: MissedReuses, endpoint: EndpointId, overlap: Overlap | None, reused_tokens: int) -> None:
    """Test a complete stream. Tokens promised by a request in flight could not be in its events yet."""
    announced = 0 if overlap is None else overlap.claimed_tokens
    if overlap is not None and endpoint not in missed.doubted:
        announced = max(announced, overlap.tokens)
    missed.observe_reuse(endpoint, announced_tokens=announced, reused_tokens=reused_tokens)


def _without_confirmed(
    exact: Collection[EndpointId], announced: Mapping[EndpointId, PreciseMatch], tokens: int
) -> frozenset[EndpointId]:
    """Return the endpoints without those whose events confirm all `tokens` in front of the first medium. Events do not
    cover the part behind it, where routed requests count."""
    confirmed = {endpoint for endpoint, match in announced.items() if match.tokens + _LARGEST_BLOCK > tokens}
    return frozenset(exact) - confirmed


def searched_tokens(tokens: TokenIds | None, reported: ReportedBeginning | None) -> int:
    """Return how many leading tokens of a prompt KV events are searched for."""
    known = 0 if tokens is None else len(tokens)
    return known if reported is None else max(known, reported.tokens)


def _undenied(endpoint: EndpointId, match: PreciseMatch, denials: Denials) -> PreciseMatch:
    """Reduce a match by denials: placements beyond memory are hints, as a lookup's are, since their deletion is not
    reported."""
    if not match.lower:
        return match
    held = ((Tier.DEVICE, match.device_tokens), *match.lower)
    beyond = trusted_tokens(endpoint, held, denials) - match.device_tokens
    return PreciseMatch(match.device_tokens, cut_lower(match.lower, beyond), match.dp_rank)
