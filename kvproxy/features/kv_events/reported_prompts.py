"""Blocks of prompts with media by the names that engines give them, learned from KV events.

No tokenizer says what a prompt is behind its first picture. The events of the engine that served it do: the chain
stored since it was routed that ends where the prompt's last whole block does, whose beginning is the text already
known, and whose media are as many. From then on a prompt that begins so is looked up by these blocks. Versions of
engines may call a picture differently, so that only engines of one version are taken together. Bounded; the longest
unused go first."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.precise import PreciseIndex
from kvproxy.cache.media.cut import HEAD_OF_STAND_IN, Medium
from kvproxy.cache.overlap.media_reports import MediaReports, ReportedBeginning, ServedPrompt
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.prefix.token_memory import GENERATION_PROMPT_TOKENS
from kvproxy.features.kv_events.media_chains import Identifier, MediaChains, PlacedMedium

_MAX_PROMPTS = 16_384
_MAX_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 300
_MAX_MEDIA = 16_384
#: Served prompts of one endpoint whose events did not come yet.
_MAX_WAITING = 16
_MAX_ENDPOINTS = 4096


class ReportedPrompts(MediaReports):
    """Beginnings of prompts with media that one cluster's engines reported."""

    def __init__(self, precise: PreciseIndex) -> None:
        super().__init__()
        self._precise = precise
        self._chains = precise.media = MediaChains()
        self._known: BoundedMapping[int, ReportedBeginning] = BoundedMapping(
            _MAX_PROMPTS, max_bytes=_MAX_BYTES, size_of=lambda one: _ENTRY_BYTES + 8 * len(one.hashes)
        )
        self._identifiers: BoundedMapping[tuple[str, str], Identifier] = BoundedMapping(_MAX_MEDIA)
        self._named: BoundedMapping[tuple[str, Identifier], str] = BoundedMapping(_MAX_MEDIA)
        self._waiting: BoundedMapping[EndpointId, deque[ServedPrompt]] = BoundedMapping(_MAX_ENDPOINTS)
        self._noted = 0  # events with media, when last looked
        self._software: str | None = None

    def __len__(self) -> int:
        return len(self._known)

    @property
    def noted(self) -> int:
        """Events with media until now."""
        return self._chains.noted

    def follow_software(self, engines: Iterable[str | None]) -> bool:
        """Return whether these engines are of one version, which call a picture alike. What another version called
        them is forgotten."""
        versions = {software for software in engines if software is not None}
        if len(versions) > 1:
            return False
        software = versions.pop() if versions else self._software
        if software != self._software and self._software is not None:
            for held in (self._known, self._identifiers, self._named, self._waiting):
                held.clear()
        self._software = software
        return True

    def find_beginning(
        self, keys: Sequence[int], hashes: Sequence[int], media: Sequence[Medium]
    ) -> ReportedBeginning | None:
        """Return the longest known beginning of a prompt; None where the cluster's engines have other blocks."""
        known = self._known
        best = None
        for parts in range(len(keys), 0, -1):
            if keys[parts - 1] in known:
                found = known[keys[parts - 1]]
                best = found._replace(whole=True) if parts == len(keys) else _shortened(found)
                break
        for medium in reversed(media):
            key = _key_of(medium, hashes)
            if key is not None and key in known:
                through = known[key]
                best = through if best is None or through.tokens > best.tokens else best
                break
        return best if best is not None and self._precise.block_sizes == {best.block_size} else None

    def note_served(self, endpoint: EndpointId, served: ServedPrompt) -> None:
        """Learn from a prompt that the endpoint has computed, now or once its events come."""
        if not self._learn(endpoint, served):
            waiting = self._waiting.get(endpoint)
            if waiting is None:
                waiting = self._waiting[endpoint] = deque(maxlen=_MAX_WAITING)
            waiting.append(served)

    def events_came(self, endpoint: EndpointId) -> None:
        """Look again for prompts that were served by the endpoint before its events came."""
        noted = self._chains.noted
        if noted == self._noted:
            return
        self._noted = noted
        waiting = self._waiting.get(endpoint)
        for _ in range(len(waiting) if waiting else 0):
            assert waiting is not None
            served = waiting.popleft()
            if not self._learn(endpoint, served):
                waiting.append(served)

    def forget(self, keys: Sequence[int], hashes: Sequence[int], media: Sequence[Medium], model: str) -> None:
        """Forget a prompt whose reuse contradicted the prediction."""
        for key in (*keys, *[key for medium in media if (key := _key_of(medium, hashes)) is not None]):
            self._known.pop(key, None)
        for medium in media:
            identifier = self._identifiers.pop((model, medium.key), None)
            if identifier is not None:
                self._named.pop((model, identifier), None)

    def _learn(self, endpoint: EndpointId, served: ServedPrompt) -> bool:
        """Return whether exactly one chain can be the prompt's."""
        for size in self._precise.block_sizes:
            fitting = list(self._find_fitting(endpoint, served, size))
            if len(fitting) == 1:
                self._note(served, size, *fitting[0])
                return True
        return False

    def _find_fitting(
        self, endpoint: EndpointId, served: ServedPrompt, size: int
    ) -> Iterator[tuple[array[int], list[PlacedMedium]]]:
        chains = self._chains
        blocks = served.prompt_tokens // size
        for chain in chains.find_chains(endpoint, block_size=size, blocks=blocks, since=served.noted):
            placed = chains.media_of(chain, size)
            if not self._may_be(served, placed):
                continue
            front = served.text_blocks(size)
            if chain[: len(front)] == front:
                yield chain, placed

    def _may_be(self, served: ServedPrompt, placed: Sequence[PlacedMedium]) -> bool:
        """Return whether these can be the media of the prompt: one identifier for each content, and none that belongs
        to another."""
        if len(placed) != len(served.media):
            return False
        pairs = {(medium.key, one.identifier) for medium, one in zip(served.media, placed, strict=True)}
        if len(pairs) != len({key for key, _ in pairs}) or len(pairs) != len({name for _, name in pairs}):
            return False
        model = served.model
        return all(
            self._identifiers.get((model, key)) in (None, identifier)
            and self._named.get((model, identifier)) in (None, key)
            for key, identifier in pairs
        )

    def _note(self, served: ServedPrompt, size: int, chain: array[int], placed: Sequence[PlacedMedium]) -> None:
        for medium, one in zip(served.media, placed, strict=True):
            self._identifiers[served.model, medium.key] = one.identifier
            self._named[served.model, one.identifier] = medium.key
            if one.tokens:
                self.on_counted(served.model, medium, one.tokens)
                end = one.start + one.tokens
                key = _key_of(medium, served.hashes)
                if key is not None:
                    self._known[key] = ReportedBeginning(size, chain[: end // size], end)
        if served.keys:
            self._known[served.keys[-1]] = ReportedBeginning(size, chain, served.prompt_tokens)


def _shortened(known: ReportedBeginning) -> ReportedBeginning:
    """Return the blocks of a prompt that surely stay when its chat goes on."""
    kept = max(0, known.prompt_tokens - GENERATION_PROMPT_TOKENS) // known.block_size
    return known._replace(hashes=known.hashes[:kept])


def _key_of(medium: Medium, hashes: Sequence[int]) -> int | None:
    """Return the hash that names a prompt's text up to this medium's key; None where that is in no whole block."""
    at = -(-(medium.start + HEAD_OF_STAND_IN) // TEXT_BLOCK_BYTES) - 1
    return hashes[at] if at < len(hashes) else None
