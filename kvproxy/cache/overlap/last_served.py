"""Last endpoints of sessions and stored responses, and the tokens left there: the only source for a prompt that begins
with a history that only its engine has. Pure; the time is an argument."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.base.types import EndpointId, InferenceRequest

#: Sessions remembered, and as many responses; the longest unused go first.
MAX_REMEMBERED = 32_768
#: An engine's cache has other contents after this time.
MAX_AGE_S = 3600.0
_ENTRY_BYTES = 450  # an entry and its place in a table, besides the text blocks

#: Endpoints of which is known when they lost their cache.
_MAX_LOST = 1024

#: Text blocks kept of a history, which include the common beginning of many.
_MAX_ROOT = 128
NO_BLOCKS = array("Q")

#: Message prefixes noted of a prompt, from each of its ends.
_EDGES = 4


class Served(msgspec.Struct, frozen=True, gc=False):
    """The last request of a session, or the one that a response answered."""

    endpoint: EndpointId
    losses: int  # caches that had been lost by then, of any endpoint
    at: float
    prompt_tokens: int  # that the engine holds since
    tokens: int  # with those of the answer
    keys: array[int]  # of its prompt's first and last message prefixes
    root: array[int]  # text blocks that its prompt begins with, if another may go on from it


#: Called with the session (0: none), the response (0: none), and their new state; None: the session is over.
ServedWatch = Callable[[int, int, Served | None], None]


class RequestNames(msgspec.Struct, frozen=True):
    """Hashed session identifiers of a request; 0 if absent."""

    seed: int = 0  # of all that share its names
    session: int = 0
    parent: int = 0
    history: int = 0  # the response that it goes on from

    @classmethod
    def name_request(cls, request: InferenceRequest, seed: int, tenant: str) -> RequestNames:
        """Scoped by `seed` (model and cache salt) and tenant: the same id of others is another session."""
        seed = _digest(tenant, seed)
        return cls(
            seed, _name(request.session_key, seed), _name(request.parent_session, seed), _name(request.continues, seed)
        )


NO_NAMES = RequestNames()


class LastServed:
    """Sessions and responses in tables of their own, so that many of one kind do not push out the other.

    Plain dicts in order of use: every request of a session comes by.
    """

    def __init__(self, *, max_entries: int = MAX_REMEMBERED) -> None:
        self._max_entries = max_entries
        self._sessions: dict[int, Served] = {}
        self._responses: dict[int, Served] = {}
        self._losses = 0
        self._lost: dict[EndpointId, int] = {}  # the number of its last loss, the latest last
        self._forgotten = 0  # the highest number dropped from there: older entries no longer count
        self._bytes = 0
        self.watch: ServedWatch | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes held at most: what entries share is counted for each."""
        return self._bytes

    @property
    def sessions(self) -> int:
        """Sessions remembered."""
        return len(self._sessions)

    @property
    def responses(self) -> int:
        """Responses remembered."""
        return len(self._responses)

    def find_history(self, names: RequestNames, now: float) -> Served | None:
        """Return what the request goes on from: the response it names, else the last of its session, or of the session
        that it was made from."""
        for table, name in (
            (self._responses, names.history),
            (self._sessions, names.session),
            (self._sessions, names.parent),
        ):
            served = table.get(name)
            if served is not None and self.stands(served, now):
                return served
        return None

    def note_served(
        self,
        names: RequestNames,
        *,
        response_id: str,
        endpoint: EndpointId,
        prompt_tokens: int,
        answer_tokens: int,
        keys: Sequence[int] = (),
        root: array[int] = NO_BLOCKS,
        now: float,
    ) -> None:
        """Note where a request with these names was served; another may continue it by `response_id`, if it has one."""
        if not (names.session or response_id):
            return
        edges = keys if len(keys) <= 2 * _EDGES else (*keys[:_EDGES], *keys[-_EDGES:])
        tokens = prompt_tokens + answer_tokens
        root = root if len(root) <= _MAX_ROOT else root[:_MAX_ROOT]
        served = Served(endpoint, self._losses, now, prompt_tokens, tokens, array("Q", edges), root)
        response = _digest(response_id, names.seed) if response_id else 0
        if self.watch is not None:
            self.watch(names.session, response, served)
        self._enter(names.session, response, served)

    def adopt(self, session: int, response: int, served: Served) -> None:
        """Another proxy noted this; no cache was lost since, as far as is known here."""
        self._enter(session, response, msgspec.structs.replace(served, losses=self._losses))

    def end_session(self, session: int) -> Served | None:
        """Nothing more comes of the session: what it was last is forgotten, and returned."""
        if self.watch is not None and session in self._sessions:
            self.watch(session, 0, None)
        return self.forget(session)

    def forget(self, session: int) -> Served | None:
        """As `end`, by another proxy's word."""
        return self._drop(self._sessions, session)

    def entries(self) -> Iterator[tuple[int, int, Served]]:
        """Yield sessions, then responses, each with its record; the longest unused first. Not to be changed
        meanwhile."""
        yield from ((session, 0, served) for session, served in self._sessions.items())
        yield from ((0, response, served) for response, served in self._responses.items())

    def forget_cache(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left or lost its cache."""
        self._losses += 1
        self._lost.pop(endpoint, None)
        self._lost[endpoint] = self._losses
        if len(self._lost) > _MAX_LOST:
            self._forgotten = self._lost.pop(next(iter(self._lost)))

    def _enter(self, session: int, response: int, served: Served) -> None:
        if session:
            self._put(self._sessions, session, served)
        if response:
            self._put(self._responses, response, served)

    def stands(self, served: Served, now: float) -> bool:
        """Return True if its endpoint may still hold it."""
        lost = self._lost.get(served.endpoint, self._forgotten)
        return now - served.at <= MAX_AGE_S and served.losses >= lost

    def _put(self, table: dict[int, Served], name: int, served: Served) -> None:
        self._drop(table, name)
        table[name] = served
        self._bytes += _size(served)
        if len(table) > self._max_entries:
            self._drop(table, next(iter(table)))

    def _drop(self, table: dict[int, Served], name: int) -> Served | None:
        served = table.pop(name, None)
        if served is not None:
            self._bytes -= _size(served)
        return served


def _size(served: Served) -> int:
    return _ENTRY_BYTES + 8 * (len(served.root) + len(served.keys))


def _name(key: str | None, seed: int) -> int:
    return 0 if key is None else _digest(key, seed)


def _digest(text: str, seed: int) -> int:
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed)
