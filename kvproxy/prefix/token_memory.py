"""Remembers the tokens of prompts by message prefix, so that a chat's next turn is known without tokenizing it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from cachetools import TTLCache

from kvproxy.prefix.hashing import message_chain, mix_keys
from kvproxy.types import Clock, Prompt

_ENTRY_BYTES = 500  # an entry's objects besides the tokens themselves
#: Chained hash of a message prefix, and how many bytes went into it.
_Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Recalled:
    """Tokens of a prompt's longest known message prefix. Not to be changed."""

    tokens: array[int]
    exact: bool  # the whole prompt as it was tokenized; otherwise whole blocks of its beginning
    parts_known: int


@dataclass(slots=True)
class TokenMemoryStats:
    """How recalls and remembers went."""

    exact: int = 0
    prefix: int = 0
    missed: int = 0
    too_large: int = 0


@dataclass(slots=True)
class _Entry:
    tokens: array[int]
    grown_from: _Key | None = None
    grown_into: int = 0


class TokenMemory:
    """Bounded in bytes, entries and age; holds hashes and token ids, never text.

    A grown chat's tokens begin with the earlier turn's, but for the generation prompt at its end, which some templates
    drop or change later (a thinking tag, say): a partial recall gives up `generation_prompt_tokens` and whatever is
    then no whole `block_tokens`. Of a chat that only grows the latest two turns are kept.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        max_bytes: int = 256 * 1024 * 1024,
        max_entries: int = 100_000,
        ttl_s: float = 3600.0,
        block_tokens: int = 16,
        generation_prompt_tokens: int = 8,
    ) -> None:
        self.stats = TokenMemoryStats()
        self._max_entries = max_entries
        self._block_tokens = block_tokens
        self._given_up = generation_prompt_tokens
        self._entries: TTLCache[_Key, _Entry] = TTLCache(max_bytes, ttl_s, timer=clock, getsizeof=_size)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Bytes held, objects included."""
        return int(self._entries.currsize)

    def recall(self, model: str, prompt: Prompt, *, salt: str = "") -> Recalled | None:
        """The tokens of the longest known message prefix; None when nothing useful is known."""
        keys = list(_keys(model, prompt, salt))
        for parts in range(len(keys), 0, -1):
            entry = self._get(keys[parts - 1])
            if entry is None:
                continue
            if parts == len(keys):
                self.stats.exact += 1
                return Recalled(entry.tokens, True, parts)
            keep = (len(entry.tokens) - self._given_up) // self._block_tokens * self._block_tokens
            if keep > 0:
                self.stats.prefix += 1
                return Recalled(entry.tokens[:keep], False, parts)
        self.stats.missed += 1
        return None

    def remember(self, model: str, prompt: Prompt, tokens: array[int], *, salt: str = "") -> None:
        """The whole prompt tokenizes to `tokens` (`array('I')`), the generation prompt included."""
        entry = _Entry(tokens)
        keys = list(_keys(model, prompt, salt))
        if not keys or _size(entry) > self._entries.maxsize:
            self.stats.too_large += bool(keys)
            return
        known = self._get(keys[-1])
        if known is not None:
            entry.grown_from, entry.grown_into = known.grown_from, known.grown_into
        else:
            self._supersede(entry, keys[:-1])
        while len(self._entries) >= self._max_entries:
            self._entries.popitem()
        self._entries[keys[-1]] = entry

    def clear(self) -> None:
        """Forget everything (a model's template changed)."""
        self._entries.clear()

    def _supersede(self, entry: _Entry, keys: list[_Key]) -> None:
        """Note what the prompt grew from, and forget what that grew from unless other chats did too."""
        for key in reversed(keys):
            older = self._get(key)
            if older is None:
                continue
            entry.grown_from = key
            older.grown_into += 1
            oldest = None if older.grown_from is None else self._get(older.grown_from)
            if oldest is not None and oldest.grown_into == 1:
                assert older.grown_from is not None
                del self._entries[older.grown_from]
            return

    def _get(self, key: _Key) -> _Entry | None:
        try:
            return self._entries[key]
        except KeyError:  # cheaper than .get, which takes the slow path of the base class
            return None


def _size(entry: _Entry) -> int:
    return _ENTRY_BYTES + entry.tokens.itemsize * len(entry.tokens)


def _keys(model: str, prompt: Prompt, salt: str) -> Iterator[_Key]:
    """One key per message prefix, over everything that shapes the template; shortest first."""
    length = len(prompt.shape)
    for key, part in zip(message_chain(prompt, mix_keys(0, (model, salt))), prompt.parts, strict=True):
        length += len(part)
        yield key, length
