"""Prefixes requested repeatedly.

Message prefixes are counted, not only whole prompts, so that a system prompt shared by many chats becomes hot."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from xxhash import xxh3_64_intdigest

from kvproxy.cache.clients.tokens import TokenIds

#: Of a long chat only this many of its first and of its last message prefixes are counted.
EDGE_PREFIXES = 4
#: Prefixes that agree in this many tokens share cache entries (a chunk of LMCache's).
HEAD_TOKENS = 256


@dataclass(slots=True, eq=False)
class KnownPrefix:
    """A message prefix, and its tokens once they are known."""

    key: int
    model: str
    cache_salt: str
    uses: deque[float]
    whole: int  # key of the prompt it was first seen in
    tokens: TokenIds = field(default_factory=lambda: array("I"))
    shared: bool = False  # prompts that differ after it were seen: its tokens end where they part
    instances: set[str] = field(default_factory=set)  # that served it
    head: int = 0  # hash of its first tokens
    session: int = 0  # the only session that requested it; 0: none, or several
    promised_until: float = 0.0  # to a client

    @property
    def actionable(self) -> bool:
        """Its own tokens are known: it is a whole prompt, or it was seen to end."""
        return bool(self.tokens) and (self.shared or self.key == self.whole)

    @property
    def name(self) -> str:
        """For logs: a hash, never text."""
        return f"{self.key:016x}"


#: Uses remembered of a prefix.
MAX_RECORDS = 300
#: Prefixes whose uses are counted.
MAX_KEYS = 100_000

#: Called for each use: keys of the prefixes, model, cache salt, instance and session.
UseWatch = Callable[[Sequence[int], str, str, str, int], None]


class Hotness:
    """Bounded in prefixes, in uses remembered for each, and in bytes of tokens; the longest unused goes first."""

    def __init__(
        self,
        *,
        window_s: float,
        max_records: int = MAX_RECORDS,
        max_keys: int = MAX_KEYS,
        max_token_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.window_s = window_s
        self._max_records = max_records
        self._max_keys = max_keys
        self._max_tokens = max_token_bytes // 4
        #: Least recently used first. No BoundedMapping: tokens of a prefix come and go while it is held.
        self._prefixes: OrderedDict[int, KnownPrefix] = OrderedDict()
        self._tokens = 0
        self.watch: UseWatch | None = None

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def held_bytes(self) -> int:
        """Bytes of token ids kept, over all prefixes."""
        return 4 * self._tokens

    def count_use(
        self, keys: Sequence[int], *, model: str, cache_salt: str, instance: str, now: float, session: int = 0
    ) -> list[KnownPrefix]:
        """Count a prompt of `session` with these message prefixes (shortest first, the whole prompt last), served at
        `instance`."""
        edges = keys if len(keys) <= 2 * EDGE_PREFIXES else [*keys[:EDGE_PREFIXES], *keys[-EDGE_PREFIXES:]]
        if self.watch is not None:
            self.watch(edges, model, cache_salt, instance, session)
        return self.adopt_use(edges, model=model, cache_salt=cache_salt, instance=instance, now=now, session=session)

    def adopt_use(
        self, edges: Sequence[int], *, model: str, cache_salt: str, instance: str, now: float, session: int = 0
    ) -> list[KnownPrefix]:
        """As `count_use`, by another proxy's word."""
        used = []
        for key in edges:
            prefix = self._prefixes.get(key)
            if prefix is None:
                uses: deque[float] = deque(maxlen=self._max_records)
                prefix = self._prefixes[key] = KnownPrefix(
                    key, model, cache_salt, uses, whole=edges[-1], session=session
                )
            elif prefix.session != session:
                prefix.session = 0
            prefix.uses.append(now)
            prefix.instances.add(instance)
            self._prefixes.move_to_end(key)
            used.append(prefix)
        self._trim()
        return used

    def learn_tokens(self, used: Sequence[KnownPrefix], tokens: TokenIds) -> None:
        """Set the tokens of a prompt whose prefixes were `used`: a prefix ends where two prompts differ."""
        if not used:
            return
        whole = used[-1].key
        for prefix in used:
            if prefix.key not in self._prefixes:
                continue
            if not prefix.tokens or prefix.key == whole:
                self._set_tokens(prefix, tokens)
                prefix.whole = whole
            elif prefix.whole != whole:
                self._set_tokens(prefix, prefix.tokens[: common_tokens(prefix.tokens, tokens)])
                prefix.shared = True
        self._trim()

    def find_prefix(self, key: int) -> KnownPrefix | None:
        """Return the prefix of this key, if it is known."""
        return self._prefixes.get(key)

    def count_recent_uses(self, prefix: KnownPrefix, now: float) -> int:
        """Use within the window."""
        uses = prefix.uses
        since = now - self.window_s
        while uses and uses[0] < since:
            uses.popleft()
        return len(uses)

    def walk_coldest(self, instance: str) -> Iterator[KnownPrefix]:
        """Prefixes with tokens that `instance` served, the longest unused first. Not to be changed meanwhile."""
        return (one for one in self._prefixes.values() if one.actionable and instance in one.instances)

    def walk_latest(self, most: int) -> Iterator[KnownPrefix]:
        """Yield the last used ones. Not to be changed meanwhile."""
        return islice(reversed(self._prefixes.values()), most)

    def end_session(self, session: int, keys: Sequence[int]) -> None:
        """End a session whose last prompt had these prefixes: those that it alone requested are no longer hot, so that
        their pins end, and they are the first to be evicted."""
        for key in keys:
            prefix = self._prefixes.get(key)
            if prefix is not None and session and prefix.session == session:
                prefix.uses.clear()
                self._prefixes.move_to_end(key, last=False)

    def note_emptied(self, instance: str) -> None:
        """Note that `instance` no longer holds any prefix."""
        for prefix in self._prefixes.values():
            prefix.instances.discard(instance)

    def _set_tokens(self, prefix: KnownPrefix, tokens: TokenIds) -> None:
        self._tokens += len(tokens) - len(prefix.tokens)
        prefix.tokens = tokens
        prefix.head = xxh3_64_intdigest(tokens[:HEAD_TOKENS].tobytes())

    def _trim(self) -> None:
        while self._prefixes and (len(self._prefixes) > self._max_keys or self._tokens > self._max_tokens):
            _, prefix = self._prefixes.popitem(last=False)
            self._tokens -= len(prefix.tokens)


def common_tokens(a: TokenIds, b: TokenIds) -> int:
    """Length of the common beginning, by halving over memory compares."""
    low = 0
    high = min(len(a), len(b))
    if memoryview(a)[:high] == memoryview(b)[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
