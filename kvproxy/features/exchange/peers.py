"""Peers: lives that begin, end and fall silent, the messages to and from each, and the joining of a new one. Pure:
messages in, messages out, the time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from kvproxy.features.exchange import wire
from kvproxy.features.exchange.joining import Joining, ReceiveSnapshot
from kvproxy.features.exchange.journal import Journal
from kvproxy.features.exchange.lives import Lives
from kvproxy.features.exchange.own_messages import OwnMessages
from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.peer_applier import PeerApplier
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.wire import Message, Origin


class SyncStatus(StrEnum):
    """How it stands with the others."""

    JOINING = "joining"
    ALONE = "alone"  # no living peer
    SYNCED = "synced"
    DEGRADED = "degraded"  # messages of a peer are missing, or the link is down


class Peers:
    """Peers of this process. `send` is called with bytes for one peer, or for all; `serve` with one that wants the
    whole state, `receive_snapshot` with the answer to such a request."""

    def __init__(
        self,
        journal: Journal,
        world: Callable[[], SharedState],
        *,
        send: Callable[[bytes, Origin | None], None],
        beat_s: float,
        serve: Callable[[Origin], None] = lambda peer: None,
        receive_snapshot: ReceiveSnapshot | None = None,
        other: Callable[[Message], None] = lambda message: None,
        blocks: Callable[[], int] = lambda: 0,
    ) -> None:
        self.origin = journal.origin
        self.lives = Lives(self._make_peer, beat_s=beat_s)
        self.known = self.lives.known
        self.own = OwnMessages(journal, send)
        self.send_to = self.own.send_to
        self._journal = journal
        self._world = world
        self._serve = serve
        self._other = other
        self._blocks = blocks
        #: Takes the others' state when joining.
        self.newcomer = Joining(self.origin, send_to=self.send_to, receive=receive_snapshot, over=self._go_on)

    @property
    def living(self) -> list[Peer]:
        """Peers that are alive."""
        return self.lives.living

    @property
    def status(self) -> SyncStatus:
        """Where nothing is known of what carries the messages."""
        if self.newcomer.running:
            return SyncStatus.JOINING
        if not (living := self.living):
            return SyncStatus.ALONE
        return SyncStatus.SYNCED if all(peer.in_order for peer in living) else SyncStatus.DEGRADED

    def join(self, now: float) -> None:
        """Announce the beginning of a life, and request the state from a peer that answers."""
        self.newcomer.begin(now)
        self.send_to(None, wire.Hello(self.origin))

    def leave(self) -> None:
        """Announce the end of this life."""
        self.send_to(None, wire.Bye(self.origin))

    def publish(self, now: float) -> int:
        """Hand out what the journal has, as of OwnMessages, if a peer is known; returns how many batches."""
        return self.own.publish(now, to_all=bool(self.known))

    def beat(self, now: float) -> None:
        """Send a heartbeat every `beat_s`, and find peers that fell silent."""
        self._journal.look()
        self._world().keep_apart(self.origin, {peer.origin: peer.lag.quantile(0.5) for peer in self.living})
        self.lives.end_silent(now)
        beats = [(one, one.beat_sent_s) for one in self.living if one.beat_sent_s is not None]
        self.send_to(
            None, self._own_beat(now, [wire.Echo(one.origin, sent_s, now - one.beat_at) for one, sent_s in beats])
        )

    def look(self, now: float) -> None:
        """Several times a heartbeat: ask again for what is missing, and see to the end of joining."""
        for peer in self.living:
            peer.look(now)
        self.newcomer.look(now)

    def receive(self, message: Message, now: float) -> None:
        """Handle a message from a peer."""
        if message.origin.place == self.origin.place:
            return
        if isinstance(message, wire.Bye):
            self.lives.end(message.origin, now)
            return
        kind = type(message)
        peer = self.lives.meet(message.origin, now, begins=kind is wire.Hello, beats=kind is wire.Heartbeat)
        if peer is None:
            return
        peer.heard_at = now
        joining = self.newcomer.running
        match message:
            case wire.Batch():
                peer.take_batch(message, now, held=joining)
            case wire.PeerSnapshot():
                peer.take_standing(message, now, held=joining)
            case wire.Heartbeat():
                self._heard_beat(peer, message, now)
            case wire.Hello():
                self.send_to(peer.origin, self._own_beat(now, []))
                self.own.answer(peer.origin, 0, now)
            case wire.Ask():
                self.own.answer(peer.origin, message.first, now)
            case wire.StateRequest():
                self._serve(peer.origin)
            case wire.StateChunk():
                self.newcomer.take_piece(peer, message, now)
            case _:
                self._other(message)

    def _make_peer(self, origin: Origin, begins: bool, now: float) -> Peer:
        heard = PeerApplier(origin, self._world, self._journal)
        return Peer(
            origin, heard, ask=lambda first: self.send_to(origin, wire.Ask(self.origin, first)), begins=begins, now=now
        )

    def _go_on(self, now: float) -> None:
        """Take the batches of others after joining."""
        for peer in self.known.values():
            peer.go_on(now, told=self.newcomer.told)

    def _heard_beat(self, peer: Peer, beat: wire.Heartbeat, now: float) -> None:
        for echo in beat.echoes:
            if echo.peer == self.origin:
                peer.lag.went_around(now - echo.sent_s - echo.held_s)
        if not self.newcomer.running:
            peer.beat(beat, now)
        elif not beat.joining:
            self.newcomer.heard_of(peer.origin, beat.blocks, now)

    def _own_beat(self, now: float, echoes: list[wire.Echo]) -> wire.Heartbeat:
        own = self._journal
        joining = self.newcomer.running
        return wire.Heartbeat(self.origin, own.seq, now, own.told, joining, self._blocks(), echoes)
