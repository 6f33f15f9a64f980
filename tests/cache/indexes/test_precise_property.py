"""The precise index against a naive one, over random interleavings of events with duplicates, gaps and orphans."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproxy.base.types import EndpointId, LowerTokens, Tier
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cache.indexes.precise import PreciseIndex
from tests.cache.indexes.support import A, B, prompt_of, removed, stored
from tests.support.examples import examples

Path = tuple[int, ...]
Block = tuple[int, Path]  # which of the engine's names, and the blocks up to this one
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
RANKS = st.tuples(st.sampled_from([A, B]), st.integers(0, 1))
MEDIA = st.sampled_from(["GPU", "GPU", "CPU", "DISK"])


@dataclass
class NaiveRank:
    """Every block by medium."""

    on: dict[str, set[Block]] = field(default_factory=lambda: {"GPU": set(), "CPU": set(), "DISK": set()})
    told: set[Block] = field(default_factory=set)

    def store(self, medium: str, run: list[Block]) -> None:
        name, first = run[0]
        if len(first) > 1 and (name, first[:-1]) not in self.told:
            return
        self.on[medium] |= set(run)
        self.told |= set(run)

    def remove(self, medium: str, block: Block) -> None:
        self.on[medium].discard(block)

    def match(self, path: Path) -> tuple[int, LowerTokens]:
        device = self.reach(path, 0, {"GPU"})
        lower = range(device, self.reach(path, device, {"CPU", "DISK"}))
        near = sum(self.reach(path, depth, {"CPU"}) > depth for depth in lower)
        counts = ((Tier.HOST, 2 * near), (Tier.DISK, 2 * (len(lower) - near)))
        return 2 * device, tuple((tier, count) for tier, count in counts if count)

    def reach(self, path: Path, start: int, media: set[str]) -> int:
        depth = start
        while depth < len(path) and any(here == path[: depth + 1] for m in media for _, here in self.on[m]):
            depth += 1
        return depth


class PreciseAgainstNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PreciseIndex()
        self.naive: dict[tuple[EndpointId, int], NaiveRank] = {}
        self.seen: set[Path] = {(0,), (1,)}

    @rule(rank=RANKS, path=PATHS, start=st.integers(0, 5), medium=MEDIA, name=st.integers(0, 1))
    def store(self, rank: tuple[EndpointId, int], path: Path, start: int, medium: str, name: int) -> None:
        start = min(start, len(path) - 1)
        self.seen.add(path)
        self.index.apply_events(*rank, [stored(path, start, engine=name, medium=medium)])
        run = [(name, path[: i + 1]) for i in range(start, len(path))]
        self.naive.setdefault(rank, NaiveRank()).store(medium, run)

    @rule(rank=RANKS, path=PATHS, medium=MEDIA, name=st.integers(0, 1))
    def remove(self, rank: tuple[EndpointId, int], path: Path, medium: str, name: int) -> None:
        self.index.apply_events(*rank, [removed(path, engine=name, medium=medium)])
        if rank in self.naive:
            self.naive[rank].remove(medium, (name, path))

    @rule(rank=RANKS)
    def clear(self, rank: tuple[EndpointId, int]) -> None:
        self.index.clear_rank(*rank)
        self.naive.pop(rank, None)

    @rule(endpoint=st.sampled_from([A, B]))
    def endpoint_leaves(self, endpoint: EndpointId) -> None:
        self.index.remove_endpoint(endpoint)
        self.naive = {rank: known for rank, known in self.naive.items() if rank[0] != endpoint}

    @invariant()
    def same_matches(self) -> None:
        for path in self.seen:
            best: dict[EndpointId, PreciseMatch] = {}
            for (endpoint, dp_rank), known in sorted(self.naive.items()):
                match = PreciseMatch(*known.match(path), dp_rank)
                old = best.get(endpoint, PreciseMatch(0, (), 0))
                if (match.tokens, match.device_tokens) > (old.tokens, old.device_tokens):
                    best[endpoint] = match
            assert self.index.match_prompt(prompt_of(path)) == best


PreciseAgainstNaive.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
test_the_index_agrees_with_a_naive_one = PreciseAgainstNaive.TestCase
