"""Peers: lives that begin, end and fall silent, the messages to and from each, and the joining of a new one. Pure:
messages in, messages out, the time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial

from kvproxy.base.bounded import BoundedMapping
from kvproxy.features.exchange import wire
from kvproxy.features.exchange.joining import Joining, ReceiveSnapshot, RunSteps, run_at_once
from kvproxy.features.exchange.journal import Journal, SentBatches, in_parts
from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.peer_applier import PeerApplier
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.wire import Batch, Message, Origin

#: Missed heartbeats after which a peer is dead.
MISSED = 3
#: Time after which silent peers are forgotten, and bound on their number.
FORGET_S = 600.0
MAX_PEERS = 256
#: Bound on early messages of all peers; those beyond it are dropped, and a snapshot is requested instead.
MAX_EARLY_BYTES = 32 * 1024 * 1024


class SyncStatus(StrEnum):
    """How it stands with the others."""

    JOINING = "joining"
    ALONE = "alone"  # no living peer
    SYNCED = "synced"
    DEGRADED = "degraded"  # messages of a peer are missing, or the link is down


class Peers:
    """Peers of this process. `send` is called with bytes for one peer, or for all; `serve` with one that wants the
    whole state, `receive_snapshot` with the answer to such a request, `run` with steps between which other tasks may
    run."""

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
        run: RunSteps = run_at_once,
    ) -> None:
        self.origin = journal.origin
        self.known: dict[tuple[str, int], Peer] = {}
        self._journal = journal
        self._world = world
        self._send = send
        self._beat_s = beat_s
        self._serve = serve
        self._other = other
        self._blocks = blocks
        self._ended: BoundedMapping[Origin, None] = BoundedMapping(1024)  # lives that are over
        self._beats: BoundedMapping[Origin, int] = BoundedMapping(1024)  # heartbeats of ended lives
        self.sent = SentBatches()
        #: Takes the others' state when joining.
        take = self._take_late
        self.newcomer = Joining(self.origin, send_to=self.send_to, receive=receive_snapshot, take=take, run=run)

    @property
    def living(self) -> list[Peer]:
        """Peers that are alive."""
        return [peer for peer in self.known.values() if peer.alive]

    @property
    def status(self) -> SyncStatus:
        """Where nothing is known of what carries the messages."""
        if self.newcomer.holds_back:
            return SyncStatus.JOINING
        if not (living := self.living):
            return SyncStatus.ALONE
        return SyncStatus.SYNCED if all(peer.in_order for peer in living) else SyncStatus.DEGRADED

    def consistency_ratio(self, now: float) -> float:
        """Return the share of the prompts sent by living peers in the last minute that arrived here."""
        found = [peer.completeness(now) for peer in self.living]
        told = sum(one for one, _ in found)
        return 1.0 if not told else max(0.0, 1.0 - sum(lost for _, lost in found) / told)

    def join(self, now: float) -> None:
        """Announce the beginning of a life, and request the state from a peer that answers."""
        self.newcomer.begin(now)
        self._tell(wire.Hello(self.origin))

    def leave(self) -> None:
        """Announce the end of this life."""
        self._tell(wire.Bye(self.origin))

    def publish(self, now: float) -> int:
        """Hand out what the journal has; returns how many batches. They are kept for those who ask later, and sent if
        a peer is known."""
        count = 0
        for batch in self._journal.take_batches(now):
            payload = wire.encode_batch(batch, self._journal)
            self.sent.keep(batch.seq, payload)
            if self.known:
                self._send(payload, None)
            count += 1
        return count

    def beat(self, now: float) -> None:
        """Send a heartbeat every `beat_s`, and find peers that fell silent."""
        self._journal.look()
        self._world().keep_apart(self.origin, {peer.origin: peer.lag.quantile(0.5) for peer in self.living})
        for peer in list(self.known.values()):
            silent_s = now - peer.heard_at
            if peer.alive and silent_s > MISSED * self._beat_s:
                peer.die(now)
            elif silent_s > FORGET_S:
                del self.known[peer.origin.place]
        beats = [(one, one.beat_sent_s) for one in self.living if one.beat_sent_s is not None]
        self._tell(self._own_beat(now, [wire.Echo(one.origin, sent_s, now - one.beat_at) for one, sent_s in beats]))

    def look(self, now: float) -> None:
        """Several times a heartbeat: ask again for what is missing, and see to the end of joining."""
        for peer in self.living:
            peer.look(now)
        self.newcomer.look(now)

    @property
    def early_bytes(self) -> int:
        """Of what came too early, of all peers."""
        return sum(peer.early_bytes for peer in list(self.known.values()))

    def receive(self, message: Message, size_bytes: int, now: float) -> None:
        """Handle a message of `size_bytes` from a peer."""
        if message.origin.place == self.origin.place:
            return
        if isinstance(message, wire.Bye):
            self._end(message.origin, now)
            return
        kind = type(message)
        peer = self._peer(message.origin, now, begins=kind is wire.Hello, beats=kind is wire.Heartbeat)
        if peer is None:
            return
        peer.heard_at = now
        if not peer.alive:
            peer.revive(now)
        match message:
            case wire.Batch() | wire.PeerSnapshot():
                self._take(peer, message, wire.held_bytes(message, size_bytes), now)
            case wire.Heartbeat():
                self._heard_beat(peer, message, now)
            case wire.Hello():
                self._welcome(peer, now)
            case wire.Ask():
                self._answer(peer, message.first, now)
            case wire.StateRequest():
                self._serve(peer.origin)
            case wire.StateChunk():
                self.newcomer.take_piece(peer, message, now)
            case _:
                self._other(message)

    def send_to(self, peer: Origin, message: Message) -> None:
        """To one peer."""
        self._send(wire.encode(message), peer)

    def _tell(self, message: Message) -> None:
        self._send(wire.encode(message), None)

    def _peer(self, origin: Origin, now: float, *, begins: bool, beats: bool) -> Peer | None:
        """Return the peer, a new one if need be; None: of a life that is over."""
        known = self.known.get(origin.place)
        if known is not None and known.origin == origin:
            return known
        over = origin in self._ended or (known is not None and not begins and origin.epoch < known.origin.epoch)
        if over and not (beats and self._beats_on(origin, known, now)):
            return None
        if known is not None:
            self._end(known.origin, now)
        if len(self.known) >= MAX_PEERS:
            return None
        heard = PeerApplier(origin, self._world, self._journal)
        ask = partial(self._ask, origin)
        peer = Peer(origin, heard, ask=ask, has_room=self._has_room, was_told=lambda: self.newcomer.told, now=now)
        if begins:
            peer.begin()
        self.known[origin.place] = peer
        return peer

    def _beats_on(self, origin: Origin, known: Peer | None, now: float) -> bool:
        """Return True if a life that was reported as ended goes on: it sends heartbeats, and another that took its
        place does not."""
        self._beats[origin] = beats = self._beats.get(origin, 0) + 1
        if beats < MISSED or (known is not None and now - known.heard_at <= MISSED * self._beat_s):
            return False
        self._ended.pop(origin, None)
        self._beats.pop(origin, None)
        return True

    def _end(self, origin: Origin, now: float) -> None:
        self._ended[origin] = None
        known = self.known.get(origin.place)
        if known is not None and known.origin == origin:
            known.die(now)
            del self.known[origin.place]

    def _ask(self, peer: Origin, first: int) -> None:
        self.send_to(peer, wire.Ask(self.origin, first))

    def _has_room(self, size_bytes: int) -> bool:
        return self.early_bytes + size_bytes <= MAX_EARLY_BYTES

    def _take(self, peer: Peer, message: Batch | wire.PeerSnapshot, size_bytes: int, now: float) -> None:
        if self.newcomer.holds_back:
            peer.heard.load(message.loads, message.seq, now)
            self.newcomer.hold(message, size_bytes)
        else:
            peer.take(message, size_bytes, now)

    def _take_late(self, message: Batch | wire.PeerSnapshot, size_bytes: int, now: float) -> None:
        peer = self.known.get(message.origin.place)
        if peer is not None and peer.origin == message.origin and peer.alive:  # else its load is gone
            peer.take(message, size_bytes, now)

    def _heard_beat(self, peer: Peer, beat: wire.Heartbeat, now: float) -> None:
        for echo in beat.echoes:
            if echo.peer == self.origin:
                peer.lag.went_around(now - echo.sent_s - echo.held_s)
        if not self.newcomer.holds_back:
            peer.beat(beat, now)
        elif not beat.joining:
            self.newcomer.heard_of(peer.origin, now)

    def _welcome(self, peer: Peer, now: float) -> None:
        """Send this process's state to a new peer at once."""
        self.send_to(peer.origin, self._own_beat(now, []))
        self._stand(peer.origin, now)

    def _own_beat(self, now: float, echoes: list[wire.Echo]) -> wire.Heartbeat:
        own = self._journal
        joining = self.newcomer.running
        return wire.Heartbeat(self.origin, own.seq, now, own.told, own.digest, joining, self._blocks(), echoes)

    def _answer(self, peer: Peer, first: int, now: float) -> None:
        missing = self.sent.since(first) if first else None
        if missing is None:
            self._stand(peer.origin, now)
        else:
            for payload in missing:
                self._send(payload, peer.origin)

    def _stand(self, to: Origin, now: float) -> None:
        self.publish(now)
        journal = self._journal
        oldest = self.sent.oldest or journal.seq + 1
        said = partial(wire.PeerSnapshot, self.origin, journal.seq, oldest, journal.told, journal.digest)
        loads = journal.rows(now)
        under_way = list(journal.open.values())
        parts = in_parts(under_way)
        while len(loads) > wire.MAX_ROWS:
            self.send_to(to, said([], loads[: wire.MAX_ROWS], True))
            del loads[: wire.MAX_ROWS]
        for part in parts[:-1]:
            self.send_to(to, said(part, [], True))
        self.send_to(to, said([] if not parts else parts[-1], loads, False))
