"""Batches of agents whose contexts need more than the engines' memory, in virtual time, beside other schedulers.

    python -m benchmarks.sessions [--cells C,C...] [--policies P,P...] [--seeds N] [--resume]

Engines of 400,000 tokens with the defaults of a vLLM server on an H100 and 20,000 tokens of prefill a second. A cell is
SHAPE-ENGINES-RATIO: the contexts need RATIO times the memory. `--cells list` prints them. Every run is kept in
sessions.json of benchmarks/reports as soon as it ends, and --resume goes on from there; sessions.md is made of all."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing_cells import ROOT
from benchmarks.sessions_report import OFF, ON, PEERS, as_markdown
from benchmarks.sessions_shapes import AGENTS_AN_ENGINE, SHAPES, needed_tokens
from kvproxy.lab.replay.batch import find_places, measure_alone, summarize_batch
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.results import ReplayOutcome, percentile
from kvproxy.lab.replay.session_rules import BEST_PLACES
from kvproxy.lab.replay.settings import ENGINES, IndexMode, Pace, ReplayFleet, TierPlan
from kvproxy.lab.replay.trace import Trace

CAPACITY_TOKENS = 400_000
POLICIES = (OFF, ON, *PEERS, BEST_PLACES)
#: Where the rules of other schedulers are.
RULES = {
    "thunderagent": "benchmarks.session_rules.thunderagent:ThunderAgent",
    "vllm_router": "benchmarks.session_rules.vllm_router:VllmRouter",
}
#: Of other shapes than agents, whose number follows from the ratio; the memory is then what gives the ratio.
SESSIONS_AN_ENGINE = 24


@dataclass(frozen=True, slots=True)
class Cell:
    """A batch on a fleet. `lost`: its last engine goes in the middle. `host`: host memory behind each engine, in
    multiples of the engine's, and the GB/s at which it is read; 0: none."""

    shape: str
    engines: int
    ratio: float
    lost: bool = False
    host: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def parse(cls, text: str) -> Cell:
        """From its name."""
        shape, engines, ratio, *more = text.split("-")
        size, _, speed = next((one for one in more if one[0].isdigit()), "0x0").partition("x")
        return cls(shape, int(engines), float(ratio), "lost" in more, (float(size), float(speed)))

    def __str__(self) -> str:
        size, speed = self.host
        host = f"-{size:g}x{speed:g}" if size else ""
        return f"{self.shape}-{self.engines}-{self.ratio:g}" + ("-lost" if self.lost else "") + host

    def draw(self, seed: int) -> tuple[Trace, ReplayFleet]:
        """Return the batch and the fleet."""
        preset = ENGINES["h100"]
        timing = replace(preset.timing, prefill_tokens_per_s=20_000.0)
        draw = SHAPES[self.shape]
        if self.shape in ("agents", "mixed", "talks"):
            trace = draw(round(AGENTS_AN_ENGINE * self.engines * self.ratio), seed)
            capacity = CAPACITY_TOKENS
        else:
            trace = draw(SESSIONS_AN_ENGINE * self.engines, seed)
            longest = max(turn.prompt_tokens + turn.output_tokens for one in trace.sessions for turn in one.turns)
            capacity = max(round(needed_tokens(trace) / self.ratio / self.engines), round(1.1 * longest))
        leaves = ((self.engines - 1, 0.5),) if self.lost else ()
        fleet = replace(preset, instances=self.engines, capacity_tokens=capacity, timing=timing, leaves=leaves)
        size, speed = self.host
        if size:
            fleet = replace(fleet, tiers=TierPlan(host=size, gb_per_s=speed), index=IndexMode.EVENTS)
        return trace, fleet


#: What matters most first: a run that is cut short has whole tables.
CELLS = (
    *(Cell("agents", 4, ratio) for ratio in (1.0, 1.5, 2.0, 4.0)),
    *(Cell("agents", engines, ratio) for engines in (2, 8) for ratio in (1.5, 2.0, 4.0)),
    *(Cell("mixed", 4, ratio) for ratio in (1.5, 2.0, 4.0)),
    *(Cell(shape, 4, 2.0) for shape in ("cc", "agent", "forks", "paused", "giant")),
    *(Cell("talks", 4, ratio) for ratio in (1.2, 2.4, 4.0)),
    Cell("agents", 4, 2.0, lost=True),
    *(Cell(shape, 4, ratio) for shape in ("cc", "agent") for ratio in (1.5, 4.0)),
    *(Cell("agents", 16, ratio) for ratio in (1.5, 2.0, 4.0)),
    *(Cell("agents", 4, 2.0, host=(size, speed)) for size, speed in ((1.0, 20.0), (4.0, 20.0), (4.0, 5.0), (4.0, 1.5))),
    Cell("agents", 4, 4.0, host=(4.0, 20.0)),
)


def run_cell(cell: Cell, policy: str, seed: int) -> dict[str, Any]:
    """Play one policy on one batch."""
    started = time.process_time()
    trace, fleet = cell.draw(seed)
    alone_s = measure_alone(trace, fleet)
    name = find_places(trace, fleet, alone_s) if policy == BEST_PLACES else policy
    outcomes = play(name, trace, fleet, seed)
    agents = [each for each in outcomes if each.tenant == "agent"]
    return {
        "cell": str(cell),
        "policy": name,
        "seed": seed,
        **_rounded(asdict(summarize_batch(agents, trace, alone_s))),
        "agents": sum(each.tenant == "agent" for each in trace.sessions),
        "memory_tokens": fleet.capacity_tokens,
        "needed": round(needed_tokens(trace) / fleet.capacity_tokens / fleet.instances, 2),
        **chat_figures([each for each in outcomes if each.tenant == "chat"]),
        "took_s": round(time.process_time() - started, 1),
    }


def play(policy: str, trace: Trace, fleet: ReplayFleet, seed: int) -> Sequence[ReplayOutcome]:
    """Return the outcomes of one run."""
    spec = PolicySpec.parse_run(RULES.get(policy, policy))
    made = spec.make(rng=Random(seed))
    return play_policy(trace, Pace(), fleet, made, spec, seed=seed)


def chat_figures(outcomes: Sequence[ReplayOutcome]) -> dict[str, float]:
    """Return the chats' TTFT, if there are any."""
    ttft = sorted(each.ttft_s for each in outcomes if each.ttft_s is not None)
    return _rounded({"chat_mean_s": sum(ttft) / len(ttft), "chat_p99_s": percentile(ttft, 0.99)}) if ttft else {}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(map(str, CELLS)), help="(default: all)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="keep the runs of the last time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports")
    args = parser.parse_args()
    if args.cells == "list":
        print("\n".join(map(str, CELLS)))
        return
    path = args.out / "sessions.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if args.resume and path.exists() else []
    known = {(row["cell"], row["policy"].partition("=")[0], row["seed"]) for row in rows}
    for seed in range(1, args.seeds + 1):
        for name in args.cells.split(","):
            for policy in args.policies.split(","):
                if (name, policy, seed) in known:
                    continue
                rows.append(run_cell(Cell.parse(name), policy, seed))
                print({key: rows[-1][key] for key in ("cell", "policy", "sessions_per_hour", "took_s")}, flush=True)
                path.write_text(json.dumps({"runs": rows}, indent=1) + "\n")
                (args.out / "sessions.md").write_text(as_markdown(rows))
    print(as_markdown(rows))


if __name__ == "__main__":
    main()
