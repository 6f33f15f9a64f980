"""Remembers the tokens of prompts by message prefix, so that a chat's next turn is known without tokenizing it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvproxy.base.types import Clock
from kvproxy.cache.prefix.hashing import chain, token_bytes

#: Ways of hashing (block size and seed) kept of one prompt: an engine has one, a mixed fleet a few.
MAX_WAYS = 4
_ENTRY_BYTES = 500  # an entry's objects besides the tokens themselves
_HASH_BYTES_PER_TOKEN = 0.5  # block hashes, at the usual 16 tokens a block
#: Longest unused entries checked for their age whenever another is made.
_LOOKED_AT = 4


class HashedTokens:
    """Neither the tokens nor a result is to be changed.

    Given `grown_from`, its hashes are continued for as long as its tokens are the same, at once, so that no request
    waits for it later.
    """

    __slots__ = ("_blocks", "tokens")

    def __init__(self, tokens: array[int], *, grown_from: HashedTokens | None = None, given_up: int = 0) -> None:
        self.tokens = tokens
        self._blocks: dict[tuple[int, int], array[int]] = {}
        if grown_from is not None:
            self._continue(grown_from, given_up)

    def blocks(self, block_size: int, seed: int) -> array[int]:
        """As `hashing.token_blocks` of all tokens."""
        way = (block_size, seed)
        blocks = self._blocks.get(way)
        if blocks is None:
            if len(self._blocks) >= MAX_WAYS:
                del self._blocks[next(iter(self._blocks))]
            blocks = self._blocks[way] = chain(token_bytes(self.tokens), 4 * block_size, seed)
        return blocks

    def leading_blocks(self, block_size: int, seed: int, tokens: int) -> array[int]:
        """Return the same of the first `tokens` only."""
        blocks = self.blocks(block_size, seed)
        count = tokens // block_size
        return blocks if count >= len(blocks) else blocks[:count]

    def _continue(self, earlier: HashedTokens, given_up: int) -> None:
        same = max(0, len(earlier.tokens) - given_up)
        if not earlier._blocks or self.tokens[:same] != earlier.tokens[:same]:
            return
        data = token_bytes(self.tokens)
        for (block_size, seed), blocks in earlier._blocks.items():
            kept = blocks[: same // block_size]
            parent = kept[-1] if kept else seed
            rest = chain(data, 4 * block_size, parent, start=4 * block_size * len(kept))
            self._blocks[block_size, seed] = kept + rest


class Recalled(NamedTuple):
    """Tokens of a prompt's longest known message prefix. Not to be changed."""

    tokens: array[int]
    exact: bool  # the whole prompt as it was tokenized; otherwise whole blocks of its beginning
    parts_known: int
    hashed: HashedTokens  # of all tokens of that prefix, dropped ones included


@dataclass(slots=True)
class TokenMemoryStats:
    """How recalls and remembers went."""

    exact: int = 0
    prefix: int = 0
    missed: int = 0
    too_large: int = 0


@dataclass(slots=True)
class _Entry:
    hashed: HashedTokens
    expires_at: float
    grown_from: int | None = None
    grown_into: int = 0


#: Tokens at the end of a prompt that templates change when a chat goes on.
GENERATION_PROMPT_TOKENS = 8


class TokenMemory:
    """Memory of prompts' tokens, bounded in bytes, entries and age; holds hashes and token ids, never text.

    A grown chat's tokens begin with the earlier turn's, but for the generation prompt at its end, which some templates
    drop or change later (such as a thinking tag): a partial recall drops the last few and any remainder of
    `block_tokens`. Of a chat that only grows the latest two turns are kept."""

    def __init__(
        self,
        *,
        clock: Clock,
        max_bytes: int = 256 * 1024 * 1024,
        max_entries: int = 100_000,
        ttl_s: float = 3600.0,
        block_tokens: int = 16,
    ) -> None:
        self.stats = TokenMemoryStats()
        self._max_entries = max_entries
        self._block_tokens = block_tokens
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._bytes = 0
        #: In order of use. No BoundedMapping: it has no bound in age, and every request comes by (see SessionHashes).
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Bytes held, objects included."""
        return self._bytes

    def recall(self, keys: Sequence[int]) -> Recalled | None:
        """Return the tokens of the longest known message prefix of the prompt that has these keys
        (`hashing.message_chain`, begun from all that shapes the template besides); None when nothing useful is known.
        """
        for parts in range(len(keys), 0, -1):
            entry = self._get(keys[parts - 1])
            if entry is None:
                continue
            hashed = entry.hashed
            if parts == len(keys):
                self.stats.exact += 1
                return Recalled(hashed.tokens, True, parts, hashed)
            if beginning := self.beginning(hashed.tokens):
                self.stats.prefix += 1
                return Recalled(beginning, False, parts, hashed)
        self.stats.missed += 1
        return None

    def remember(self, keys: Sequence[int], tokens: array[int]) -> HashedTokens:
        """Return the whole prompt with these keys tokenizes to `tokens` (`array('I')`), the generation prompt
        included."""
        entry = _Entry(HashedTokens(tokens), self._clock() + self._ttl_s)
        if not keys or _size(entry) > self._max_bytes:
            self.stats.too_large += bool(keys)
            return entry.hashed
        known = self._get(keys[-1])
        if known is not None:
            entry.grown_from = known.grown_from
            entry.grown_into = known.grown_into
        else:
            self._supersede(entry, keys[:-1])
        self._drop(keys[-1])
        self._make_room(_size(entry))
        self._entries[keys[-1]] = entry
        self._bytes += _size(entry)
        return entry.hashed

    def tokens_of(self, key: int) -> array[int] | None:
        """Return the tokens of the prompt whose last key this is, if it was tokenized as it is."""
        entry = self._get(key)
        return None if entry is None else entry.hashed.tokens

    def beginning(self, tokens: array[int]) -> array[int]:
        """Return what surely stays of a prompt's tokens when it grows; empty where nothing does."""
        return tokens[: max(0, len(tokens) - GENERATION_PROMPT_TOKENS) // self._block_tokens * self._block_tokens]

    def forget(self, keys: Sequence[int]) -> None:
        """Forget the whole prompt with these keys: its tokens were wrong."""
        if keys:
            self._drop(keys[-1])

    def release(self, key: int) -> None:
        """Nothing goes on from the prompt with this key: it is forgotten, unless something did go on from it."""
        entry = self._entries.get(key)
        if entry is not None and not entry.grown_into:
            self._drop(key)

    def _supersede(self, entry: _Entry, keys: Sequence[int]) -> None:
        """Note what the prompt grew from, and forget what that grew from unless other chats did too."""
        for key in reversed(keys):
            older = self._get(key)
            if older is None:
                continue
            entry.grown_from = key
            entry.hashed = HashedTokens(entry.hashed.tokens, grown_from=older.hashed, given_up=GENERATION_PROMPT_TOKENS)
            older.grown_into += 1
            oldest = None if older.grown_from is None else self._get(older.grown_from)
            if oldest is not None and oldest.grown_into == 1:
                assert older.grown_from is not None
                self._drop(older.grown_from)
            return

    def _get(self, key: int) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        if entry.expires_at <= self._clock():
            self._bytes -= _size(entry)
            return None
        self._entries[key] = entry
        return entry

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _size(entry)

    def _make_room(self, size: int) -> None:
        """Drop the longest unused entries, and those of them that are too old."""
        now = self._clock()
        for key, entry in list(islice(self._entries.items(), _LOOKED_AT)):
            if entry.expires_at <= now:
                self._drop(key)
        while self._entries and (self._bytes + size > self._max_bytes or len(self._entries) >= self._max_entries):
            self._drop(next(iter(self._entries)))


def _size(entry: _Entry) -> int:
    tokens = entry.hashed.tokens
    return _ENTRY_BYTES + int((tokens.itemsize + _HASH_BYTES_PER_TOKEN) * len(tokens))
