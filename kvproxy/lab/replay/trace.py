"""Request traces: this project's format, and Mooncake's original JSONL."""

from __future__ import annotations

import gzip
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvproxy.base.errors import KvproxyError

DEFAULT_BLOCK_SIZE = 512

#: A prefix of more requests than this, and than this share of them, is no conversation's own.
_COMMON_REQUESTS = 100
_COMMON_SHARE = 0.01


class Half(StrEnum):
    """Conversations of a trace to play: constants are tuned on one half and figures reported on the other."""

    TUNING = "tuning"  # those of even number, counted from 0 in the order they begin
    REPORT = "report"  # those of odd number
    BOTH = "both"


class TraceError(KvproxyError):
    """The file is no trace."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `blocks` are its whole blocks; equal ids are equal prefixes up to and including that block."""

    delay_s: float  # after the end of the session's turn before it; 0 for a first one
    prompt_tokens: int
    output_tokens: int
    blocks: array[int]  # `array('Q')`
    calls_tool: bool = True  # its answer does, or that is not known


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Turns that follow each other. A trace without sessions has one turn in each."""

    start_s: float
    turns: tuple[Turn, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in order of their starts, which begin at 0."""

    name: str
    block_size: int
    sessions: tuple[TraceSession, ...]
    half: Half = Half.BOTH

    @property
    def requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def has_sessions(self) -> bool:
        """True if requests depend on earlier ones."""
        return len(self.sessions) < self.requests

    def turns_in_nominal_order(self, *, service_s: float) -> list[tuple[float, Turn]]:
        """Every turn at the time it would come if each took `service_s` seconds."""
        timed = []
        for session in self.sessions:
            now = session.start_s
            for turn in session.turns:
                now += turn.delay_s
                timed.append((now, turn))
                now += service_s
        return sorted(timed, key=lambda pair: pair[0])

    def hit_ceiling(self) -> float:
        """Share of prompt tokens a single cache without limits would serve."""
        seen: set[int] = set()
        hits = tokens = 0
        for _, turn in self.turns_in_nominal_order(service_s=1.0):
            tokens += turn.prompt_tokens
            hits += self.block_size * min(_known(turn.blocks, seen), (turn.prompt_tokens - 1) // self.block_size)
            seen.update(turn.blocks)
        return hits / tokens if tokens else 0.0

    def take_half(self, half: Half) -> Trace:
        """One half of the conversations, its first at 0. Raises TraceError where that is nothing."""
        if half is Half.BOTH:
            return self
        wanted = [
            session
            for session, number in zip(self.sessions, self._conversations(), strict=True)
            if (number % 2 == 0) is (half is Half.TUNING)
        ]
        if not wanted:
            raise TraceError(f"{self.name}: no conversation is in the {half} half")
        first = wanted[0].start_s
        sessions = tuple(replace(session, start_s=session.start_s - first) for session in wanted)
        return replace(self, sessions=sessions, half=half)

    def _conversations(self) -> Iterator[int]:
        """Every session's number. Of single requests those are one conversation that share a prefix, save one so
        common that it reports nothing: the halves have only such prefixes in common."""
        if self.has_sessions:
            yield from range(len(self.sessions))
            return
        holders = Counter(block for session in self.sessions for block in session.turns[0].blocks)
        common = max(_COMMON_REQUESTS, _COMMON_SHARE * self.requests)
        numbers: dict[object, int] = {}
        for index, session in enumerate(self.sessions):
            own = next((block for block in session.turns[0].blocks if holders[block] <= common), None)
            yield numbers.setdefault(f"alone {index}" if own is None else own, len(numbers))

    def cut(self, requests: int) -> Trace:
        """Return the trace cut after so many requests, whole turns of the earliest sessions."""
        sessions: list[TraceSession] = []
        left = requests
        for session in self.sessions:
            if left <= 0:
                break
            sessions.append(replace(session, turns=session.turns[:left]))
            left -= len(session.turns)
        return replace(self, sessions=tuple(sessions))

    def clone(self, copies: int) -> Trace:
        """Return the trace with `copies` of every session, their starts spread evenly over the interval between two of
        them. Blocks that several sessions share stay shared; those of one session alone get fresh ids in each copy, as
        other users' text would."""
        if copies == 1:
            return self
        shared, highest = self._shared_blocks()
        gap_s = (self.sessions[-1].start_s / len(self.sessions)) / copies
        sessions = [
            replace(
                session,
                start_s=session.start_s + copy * gap_s,
                turns=tuple(_moved(turn, copy * (highest + 1), shared) for turn in session.turns),
            )
            for copy in range(copies)
            for session in self.sessions
        ]
        return replace(self, sessions=tuple(sorted(sessions, key=lambda session: session.start_s)))

    def _shared_blocks(self) -> tuple[set[int], int]:
        """Blocks of more than one session, and the highest id."""
        owner: dict[int, int] = {}
        shared: set[int] = set()
        for number, session in enumerate(self.sessions):
            for block in {block for turn in session.turns for block in turn.blocks}:
                if owner.setdefault(block, number) != number:
                    shared.add(block)
        return shared, max(owner, default=0)


def _moved(turn: Turn, offset: int, shared: set[int]) -> Turn:
    if offset == 0:
        return turn
    return replace(turn, blocks=array("Q", [block if block in shared else block + offset for block in turn.blocks]))


def read_trace(path: Path) -> Trace:
    """Read a trace, gzipped or not; the name is the file's. Raises TraceError with the line that is wrong."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return parse_trace(lines, name=path.name.split(".")[0])


def parse_trace(lines: Iterable[str], *, name: str) -> Trace:
    """Return a trace from its JSON lines."""
    block_size = DEFAULT_BLOCK_SIZE
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "meta" in row:
                block_size = int(row["meta"]["block_size"])
            else:
                rows.append((row, _turn(row, block_size)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise TraceError(f"{name}, line {number}: {type(error).__name__}: {error}") from error
    if not rows:
        raise TraceError(f"{name}: no requests")
    return Trace(name, block_size, _sessions(rows))


def _turn(row: dict[str, Any], block_size: int) -> Turn:
    prompt = int(row["input_length"])
    if prompt < 1:
        raise ValueError("input_length is below 1")
    blocks = array("Q", row["hash_ids"] if "hash_ids" in row else _unroll(row["hash_runs"]))
    delay_s = 0.0 if "timestamp" in row else float(row["delay"]) / 1000
    return Turn(delay_s, prompt, max(1, int(row["output_length"])), blocks[: prompt // block_size])


def _unroll(runs: Sequence[int]) -> Iterator[int]:
    """Block ids of `[start, length, start, length, ...]`."""
    for start, length in zip(runs[::2], runs[1::2], strict=True):
        yield from range(start, start + length)


def _sessions(rows: list[tuple[dict[str, Any], Turn]]) -> tuple[TraceSession, ...]:
    starts: dict[object, float] = {}
    turns: dict[object, list[Turn]] = {}
    tenants: dict[object, str] = {}
    for number, (row, turn) in enumerate(rows):
        key = row.get("session_id", f"line {number}")
        if "timestamp" in row:
            starts.setdefault(key, float(row["timestamp"]) / 1000)
        turns.setdefault(key, []).append(turn)
        tenants.setdefault(key, str(row.get("tenant", "")))
    first = min(starts.values(), default=0.0)
    sessions = [TraceSession(starts.get(key, first) - first, tuple(each), tenants[key]) for key, each in turns.items()]
    return tuple(sorted(sessions, key=lambda session: session.start_s))


def _known(blocks: Sequence[int], seen: set[int]) -> int:
    for index, block in enumerate(blocks):
        if block not in seen:
            return index
    return len(blocks)
