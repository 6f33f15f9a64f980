"""TTFT of the first requests after an engine's restart, with automatic warming and without, in virtual time.

    python -m benchmarks.warming [--seeds N] [--out FOLDER]

Agents: sessions that share one of a number of system prompts of 2,000 to 8,000 tokens (some of them are asked for much
more than others) and go on with turns of their own. In the middle of the run one engine is lost, and comes back empty
half a minute later; traffic does not pause for it. Warming does as the proxy's: prefixes that several sessions use, the
one that saves most first, one a round of five seconds, in pieces of 2,048 tokens, each sent only while the engine has
no more than so many requests, within a budget of tokens. Writes warming.md and warming.json of benchmarks/reports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter, defaultdict, deque
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from kvproxy.cache.settings import CacheStrategySettings, KvCacheSettings
from kvproxy.features.warming.settings import WarmingSettings
from kvproxy.features.warming.warming import PIECE_TOKENS
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.pooled import Bound, measure_bound
from kvproxy.lab.replay.results import ReplayOutcome, percentile
from kvproxy.lab.replay.router import LiveRequest, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.trace import Trace, TraceSession
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.replay.virtual_time import Change, VirtualTime
from kvproxy.lab.replay.workloads import Draw
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import EngineOutput, FirstToken, SimRequest

INSTANCES, SESSIONS, BLOCK = 4, 1600, 64
AWAY_S, FIRST = 30.0, 50
LOADS = (0.7,)
#: Without warming; of engines without a request alone; and of those with no more than the default allows.
PLANS: dict[str, int | None] = {"without": None, "max_requests 0": 0, "warming": WarmingSettings().max_requests}
PROMPTS = 64  # system prompts: most are at one engine alone


def draw_agents(rng: Random) -> Trace:
    """Draw sessions; a session's tenant names its system prompt."""
    draw = Draw(rng, BLOCK)
    systems = [draw.blocks(rng.randint(2000, 8000)) for _ in range(PROMPTS)]
    shares = [1 / (1 + rank) ** 0.7 for rank in range(PROMPTS)]
    sessions: list[TraceSession] = []
    for _ in range(SESSIONS):
        [number] = rng.choices(range(PROMPTS), shares)
        sessions.append(draw.chat(rng.uniform(0.0, 600.0), systems[number], f"{number}"))
    return draw.trace("agents", sessions)


#: Begins the names of requests that warm an engine.
WARMING = "touch:"


class WarmedEngine(Engine):
    """Keeps the answers to what warms it to itself: tokens found, of the latest ones."""

    def advance(self, now: float) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for one in super().advance(now):
            name = getattr(one, "request_id", "")
            if not name.startswith(WARMING):
                outputs.append(one)
            elif isinstance(one, FirstToken):
                self.found = (*getattr(self, "found", ()), (name, one.cached_tokens))
        return outputs

    def take_found(self) -> tuple[tuple[str, int], ...]:
        """Prompts answered since the last call, with what was found."""
        found: tuple[tuple[str, int], ...] = getattr(self, "found", ())
        self.found = ()
        return found


class WarmedTime(VirtualTime):
    """A run in which an engine that came back is warmed."""

    def __init__(self, *args: Any, systems: dict[str, list[int]], most: int | None, **others: Any) -> None:
        super().__init__(*args, **others)
        self._systems = systems
        self._most = most  # requests at an engine that is warmed; None: it is not
        self._uses: defaultdict[str, deque[float]] = defaultdict(deque)
        self._held: set[str] = set()  # by the engine that came back
        self._empty: SimEndpoint | None = None
        self._sending: tuple[str, int] | None = None  # prefix, and tokens sent of it
        self._budget = float(WarmingSettings().tokens_per_minute)
        self.counts: Counter[str] = Counter()

    def _change(self, change: Change, now: float) -> None:
        super()._change(change, now)
        if change.engine is not None:
            self._empty = change.endpoint

    def _end(self, request: LiveRequest, now: float) -> None:
        super()._end(request, now)
        uses = self._uses[request.outcome.tenant]
        uses.append(now)
        while uses[0] < now - KvCacheSettings().hot_window:
            uses.popleft()
        if self._empty is not None and request.outcome.endpoint == self._empty.index:
            self._held.add(request.outcome.tenant)

    def _scrape(self, what: None, now: float) -> None:
        super()._scrape(what, now)
        most = WarmingSettings().tokens_per_minute
        self._budget = min(most, self._budget + most / 12)
        if self._most is None or self._empty is None or self._sending is not None:
            return
        threshold = CacheStrategySettings().hot_content_threshold
        hot = [name for name, uses in self._uses.items() if len(uses) >= threshold and name not in self._held]
        if hot:
            name = max(hot, key=lambda one: len(self._uses[one]) * len(self._systems[one]))
            self._send(name, 0, now)

    def _send(self, name: str, sent: int, now: float) -> None:
        """Send the next piece, if the engine has room for it and the budget too."""
        endpoint, blocks = self._empty, self._systems[name]
        assert endpoint is not None
        assert self._most is not None
        load, tokens = endpoint.engine.load, min(len(blocks) * BLOCK, sent + PIECE_TOKENS)
        self._sending = None
        if load.running + load.waiting > self._most or tokens - sent > self._budget:
            self.counts["busy"] += 1
            return
        self._sending = (name, tokens)
        self._budget -= tokens - sent
        endpoint.engine.submit(SimRequest(f"{WARMING}{name}:{tokens}:{now}", blocks[: tokens // BLOCK], tokens, 1), now)
        self._wake(endpoint)

    def _advance(self, endpoint: SimEndpoint, now: float) -> None:
        super()._advance(endpoint, now)
        if endpoint is self._empty and isinstance(endpoint.engine, WarmedEngine):
            for _ in endpoint.engine.take_found():
                self._goes_on(now)

    def _goes_on(self, now: float) -> None:
        assert self._sending is not None
        name, sent = self._sending
        if sent < len(self._systems[name]) * BLOCK:
            self._send(name, sent, now)
            return
        self._held.add(name)
        self._sending = None
        self.counts["warmed"] += 1


def play(load: float, seed: int) -> dict[str, dict[str, float | None]]:
    """Play a run of each plan on one draw; figures of the first requests after the engine came back."""
    fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=400_000)
    bound = measure_bound(draw_agents(Random(seed)), fleet, load)
    return {plan: _play_plan(fleet, bound, most, seed) for plan, most in PLANS.items()}


def _play_plan(fleet: ReplayFleet, bound: Bound, most: int | None, seed: int) -> dict[str, float | None]:
    trace, pace, blocks = bound.trace, bound.pace, fleet.blocks_of(bound.trace)
    duration_s = pace.duration_s(trace)
    settings = [fleet.engine_settings(blocks.size, index, duration_s) for index in range(INSTANCES)]
    endpoints = [SimEndpoint(endpoint_id(at), at, WarmedEngine(each)) for at, each in enumerate(settings)]
    back_at = duration_s / 2 + AWAY_S
    changes = [Change(duration_s / 2, endpoints[0], None), Change(back_at, endpoints[0], WarmedEngine(settings[0]))]
    policy, view = PolicySpec.parse("kv_aware").make(rng=Random(seed)), IndexView(fleet, blocks.size, rng=Random(seed))
    run = WarmedTime(blocks, pace, VirtualRouter(endpoints, policy, view), view, jitter=Random(seed), changes=changes,
                     systems=_systems(trace), most=most)  # fmt: skip
    after = [one for one in run.run() if one.arrived_at >= back_at and one.ttft_s is not None]
    return {**_figures(after[:FIRST], ""), **_figures([one for one in after if one.endpoint == 0][:FIRST], "there_"),
            "warmed": run.counts["warmed"], "busy": run.counts["busy"]}  # fmt: skip


def _systems(trace: Trace) -> dict[str, list[int]]:
    """Return the common beginning of each tenant's prompts."""
    found: dict[str, list[int]] = {}
    for session in trace.sessions:
        blocks, known = list(session.turns[0].blocks), found.get(session.tenant)
        same = blocks if known is None else [a for a, b in zip(known, blocks, strict=False) if a == b]
        found[session.tenant] = same
    return found


def _figures(outcomes: list[ReplayOutcome], where: str) -> dict[str, float | None]:
    if not outcomes:
        return dict.fromkeys((f"{where}mean_ms", f"{where}p90_ms", f"{where}hit"))  # no request went there
    ttfts = sorted(one.ttft_s for one in outcomes if one.ttft_s is not None)
    prompt, cached = sum(one.prompt_tokens for one in outcomes), sum(one.cached_tokens for one in outcomes)
    return {f"{where}mean_ms": 1000 * fmean(ttfts), f"{where}p90_ms": 1000 * percentile(ttfts, 0.9),
            f"{where}hit": cached / prompt}  # fmt: skip


def as_markdown(rows: list[dict[str, Any]], command: str, seeds: int) -> str:
    """Render the report."""
    lines = [
        "# The first requests after an engine's restart", "",
        f"`{command}`. {INSTANCES} simulated engines under `kv_aware`, {PROMPTS} system prompts of 2,000 to 8,000 "
        f"tokens, one engine lost in the middle of the run and back, empty, {AWAY_S:g} s later; virtual time, means of "
        f"{seeds} draws. `first {FIRST}`: requests that came after its return, at any engine; `there`: the first "
        f"{FIRST} that went to it. `ratio`: TTFT to that without warming, the median of the draws (and its range). "
        "`max_requests 0`: engines without any request alone are warmed; else those with up to eight. "
        "`there` leaves out draws in which the "
        "router sent it nothing without warming.", "",
        f"| load | warming | first {FIRST}: TTFT (ms) | p90 | hit | ratio | there: TTFT (ms) | p90 "
        "| hit | ratio | prefixes warmed | put off |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for load in LOADS:
        cell = [row for row in rows if row["load"] == load]
        lines += [f"| {load} | {plan} | {_row(cell, plan)} |" for plan in PLANS]
    return "\n".join(lines) + "\n"


def _row(cell: list[dict[str, Any]], plan: str) -> str:
    runs, without = ([row for row in cell if row["plan"] == name] for name in (plan, "without"))
    parts = []
    for where in ("", "there_"):  # of the draws in which there were requests without warming as well
        pairs = [(a, b) for a, b in zip(runs, without, strict=True) if a[f"{where}hit"] and b[f"{where}hit"]]
        mean, p90, hit = (fmean(a[where + name] for a, _ in pairs) for name in ("mean_ms", "p90_ms", "hit"))
        ratios = sorted(a[f"{where}mean_ms"] / b[f"{where}mean_ms"] for a, b in pairs)
        ratio = "" if plan == "without" else f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        parts.append(f"{mean:.0f} | {p90:.0f} | {hit:.3f} | {ratio}")
    warmed, busy = (fmean(row[name] for row in runs) for name in ("warmed", "busy"))
    return " | ".join([*parts, f"{warmed:.1f}", f"{busy:.0f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="draws of each cell (default 3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports", help="folder of the report")
    args = parser.parse_args()
    cells = list(product(LOADS, range(1, args.seeds + 1)))
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        found = pool.starmap(play, cells, chunksize=1)
    rows = [
        {"load": load, "seed": seed, "plan": plan, **figures}
        for (load, seed), plans in zip(cells, found, strict=True)
        for plan, figures in plans.items()
    ]
    command = f"python -m benchmarks.warming --seeds {args.seeds}"
    (args.out / "warming.json").write_text(json.dumps({"command": command, "runs": rows}) + "\n")
    (args.out / "warming.md").write_text(text := as_markdown(rows, command, args.seeds))
    print(text)


if __name__ == "__main__":
    main()
