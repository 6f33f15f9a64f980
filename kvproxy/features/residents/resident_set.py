"""Contexts that one engine is to keep for the sessions that will come back, shared prefixes once. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.radix import Node, RadixTree


class ContextNode(Node):
    """A run of blocks that is part of some residents' contexts."""

    __slots__ = ("residents",)

    def __init__(self, hashes: array[int]) -> None:
        super().__init__(hashes)
        self.residents = 0


class Session(msgspec.Struct, eq=False):
    """A conversation, by its latest prompt."""

    tail: int  # hash of the prompt's last block, which names all of it
    head: int  # hash of its first block
    blocks: int
    tokens: int
    began_at: float
    home: ResidentSet | None = None  # where it is resident; None: nowhere
    leaf: ContextNode | None = None  # the end of its context there
    ended_at: float = 0.0  # end of its latest answer
    running: bool = True  # between a prompt and the end of its answer
    turns: int = 1
    stays: bool = False  # resident between its turns
    calls_tool: bool = True  # the latest answer calls one, or that is not known
    elsewhere: bool = False  # another router placed its latest turn
    name: int = 0  # as its client names it; 0: not at all
    parent: int = 0  # name of the session that it was made from

    def leave(self) -> None:
        """Give up its room, if it has any."""
        if self.home is not None:
            self.home.remove(self)


class ResidentSet:
    """The residents of one engine."""

    def __init__(self, endpoint: EndpointId) -> None:
        self.endpoint = endpoint
        self._tree: RadixTree[ContextNode] = RadixTree(ContextNode)
        self.sessions: dict[Session, None] = {}
        self._tokens = 0  # of all contexts, shared prefixes several times
        self._blocks = 0  # likewise
        self.running_tokens = 0  # of those whose turn is running
        self.capacity_tokens = 0  # of the engine's memory; 0: unknown

    def tokens(self, growth_tokens: float) -> float:
        """Tokens of the contexts, with `growth_tokens` more for each."""
        shared = self._tokens / self._blocks if self._blocks else 0.0
        return self._tree.blocks * shared + len(self.sessions) * growth_tokens

    def count_shared(self, blocks: array[int]) -> float:
        """Share of a context that some resident has."""
        cursor = self._tree.locate(blocks)
        return (cursor.depth + cursor.inside) / len(blocks)

    def enter(self, session: Session, blocks: array[int], tokens: int) -> None:
        """Add a session whose turn begins with this context, or set the context of one that is there."""
        leaf = session.leaf
        if leaf is None:
            leaf = self._add(blocks)
            self.sessions[session] = None
        else:
            self._tokens -= session.tokens
            self._blocks -= session.blocks
            goes_on = len(blocks) >= session.blocks and blocks[session.blocks - 1] == session.tail
            if goes_on and leaf.residents == 1:  # nothing is shared behind its beginning
                self._tree.append(leaf, blocks[session.blocks :])
            else:
                before = leaf
                leaf = self._add(blocks)
                self._drop(before)
        session.home = self
        session.leaf = leaf
        self._tokens += tokens
        self._blocks += len(blocks)
        self.running_tokens += tokens

    def remove(self, session: Session) -> None:
        """Remove a session."""
        assert session.leaf is not None
        del self.sessions[session]
        self._drop(session.leaf)
        self._tokens -= session.tokens
        self._blocks -= session.blocks
        session.home = session.leaf = None

    def shrink(self, limit_tokens: float, growth_tokens: float) -> Iterator[Session]:
        """Remove the sessions between turns that began last until the others are within the limit. Yields them."""
        while self.tokens(growth_tokens) > limit_tokens:
            idle = (one for one in self.sessions if not one.running)
            youngest = max(idle, key=lambda one: one.began_at, default=None)
            if youngest is None:
                return
            self.remove(youngest)
            yield youngest

    def _add(self, blocks: array[int]) -> ContextNode:
        tree = self._tree
        cursor = tree.locate(blocks)
        head = None
        if cursor.partial is not None:
            head = tree.split(cursor.partial, cursor.inside)
            head.residents = cursor.partial.residents
        tree.extend(cursor, head)
        for node in cursor.path:
            node.residents += 1
        return cursor.path[-1]

    def _drop(self, leaf: ContextNode) -> None:
        node: ContextNode | None = leaf
        while node is not None:
            parent: ContextNode | None = node.parent
            node.residents -= 1
            if not node.residents:
                self._tree.remove(node)
            node = parent
