"""A routing decision of this code beside that of another checkout, as a ratio.

`python -m benchmarks.decision_pair --before CHECKOUT [--rounds N] [--out FOLDER]`; CHECKOUT is a working tree with an
environment of its own in `.venv`. Each side is a process of its own that decides on command; batches alternate, so that
other load on the machine slows both alike. Writes decision_pair.md and decision_pair.json.

A decision is `Cluster.pick`: screening, kv_aware's cost of every endpoint, hooks, the reservation. Requests are under
way on every endpoint, speeds were learned of each, and one in eight holds a part of the prompt."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
from collections import deque
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

#: Endpoints, the share of them that holds a part of the prompt, requests in flight on each; and how many different
#: lengths are held, those of one length as one object, as an index gives them (no number: each endpoint its own).
CASES: dict[str, tuple[Any, ...]] = {
    "2 endpoints": (2, 0.5, 4),
    "8 endpoints": (8, 0.125, 4),
    "32 endpoints": (32, 0.125, 4),
    "128 endpoints": (128, 0.125, 4),
    "128 endpoints, all hold some": (128, 1.0, 4),
    "128 endpoints, all hold one of four lengths": (128, 1.0, 4, 4),
    "128 endpoints, none holds any": (128, 0.0, 4),
    "128 idle endpoints": (128, 0.125, 0),
}
BATCH = 64
PROMPT_TOKENS = 4096


def module(*names: str) -> ModuleType:
    """Return the first of these that this checkout has, since they were moved."""
    for name in names:
        try:
            return importlib.import_module(f"kvproxy.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(names[0])


class World:
    """A cluster with requests under way, and what is asked of it."""

    def __init__(self, endpoints: int, holders: float, in_flight: int, lengths: int = 0) -> None:
        self.lengths = lengths
        self.rng, self.now = random.Random(7), 1000.0
        clusters, schema = (
            module("cluster.settings", "config.cluster_schema"),
            module("operate.config.schema", "config.schema"),
        )
        settings_of = next(
            getattr(each, name)
            for each in (clusters, schema)
            for name in ("ClusterSettings", "Cluster")
            if hasattr(each, name)
        )
        endpoint_of = getattr(clusters, "EndpointSettings", None) or clusters.Endpoint
        health_of = getattr(clusters, "HealthCheckSettings", None) or clusters.HealthCheck
        self.policy = module("cluster.routing.policy", "routing.policy", "balancing.policy")
        self.names = [f"e{number}" for number in range(endpoints)]
        settings = settings_of(
            policy="kv_aware",
            endpoints=tuple(
                endpoint_of(id=name, url=f"http://127.0.0.1:{8000 + n}") for n, name in enumerate(self.names)
            ),
            health=health_of(active=False),
        )
        metrics, clock = (
            module("base.metrics.groups", "operate.metrics.catalog", "metrics.catalog").Metrics(),
            lambda: self.now,
        )
        cluster_of = module("cluster.cluster").Cluster
        self.cluster = cluster_of("bench", settings, metrics=metrics, clock=clock, rng=random.Random(1))
        self.cancelled = module("cluster.pick").AttemptOutcome.CANCELLED
        self.holders, self.most = round(holders * endpoints), in_flight * endpoints
        self.under_way: deque[Any] = deque()
        features_of = module("cluster.routing.work", "routing.work", "routing.load", "balancing.load").features_of
        for name in self.names:
            self.cluster.policies.own.policy.observe_sample(
                name, features_of(4000, 0), self.rng.uniform(0.3, 0.9), self.now
            )
        for _ in range(3 * self.most + BATCH):
            self.decide()

    def request(self) -> Any:
        """Return a prompt that some endpoints hold a part of."""
        held = self.rng.sample(self.names, self.holders)
        made = [
            self.policy.Overlap(self.rng.randrange(16, PROMPT_TOKENS, 16)) for _ in range(self.lengths or len(held))
        ]
        overlaps = {name: made[n * len(made) // len(held)] for n, name in enumerate(held)}
        return self.policy.PickRequest(facts=self.policy.OverlapFacts(PROMPT_TOKENS, overlaps))

    def decide(self) -> float:
        """Microseconds of one decision; others move on meanwhile."""
        request = self.request()
        self.now += 0.02 / len(self.names)
        began = perf_counter()
        pick = self.cluster.reserve(self.cluster.decide(request, self.now), self.now)
        took = 1e6 * (perf_counter() - began)
        self.under_way.append(pick)
        if len(self.under_way) > self.most // 2:
            self.under_way[-1 - self.most // 2].first_token(self.now)
        if len(self.under_way) > self.most:
            self.under_way.popleft().settle(self.cancelled, self.now)
        return took


def serve() -> None:
    """Decides a batch for every line that names a case, and answers with its median."""
    worlds: dict[str, World] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in worlds:
            worlds[name] = World(*CASES[name])
        print(statistics.median(worlds[name].decide() for _ in range(BATCH)), flush=True)


class Side:
    """A process that decides with the code of one checkout."""

    def __init__(self, python: Path, checkout: Path) -> None:
        command = [str(python), str(Path(__file__).resolve()), "--serve"]
        environment = {"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def median_us(self, case: str) -> float:
        """Of one batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def compare(before: Side, after: Side, rounds: int) -> dict[str, dict[str, float]]:
    """By case: medians, and the median ratio of batches that ran one after the other."""
    found = {}
    for case in CASES:
        before.median_us(case), after.median_us(case)  # built and warm
        pairs = []
        for number in range(rounds):
            first, second = (before, after) if number % 2 else (after, before)
            one, two = first.median_us(case), second.median_us(case)
            pairs.append((one, two) if number % 2 else (two, one))
        ratios = sorted(new / old for old, new in pairs)
        found[case] = {
            "before_us": statistics.median(old for old, _ in pairs),
            "after_us": statistics.median(new for _, new in pairs),
            "ratio": statistics.median(ratios),
            "ratio_p25": ratios[len(ratios) // 4],
            "ratio_p75": ratios[3 * len(ratios) // 4],
        }
    return found


def report(found: dict[str, dict[str, float]], revision: str, rounds: int) -> str:
    """As Markdown."""
    lines = [
        "# The routing decision, beside an earlier one",
        "",
        f"`python -m benchmarks.decision_pair --rounds {rounds}`: `Cluster.pick` with kv_aware, microseconds, beside",
        f"{revision}. {BATCH} decisions a batch, batches alternate; the ratio is the median of pairs, with quartiles.",
        "",
        "| | before, us | now, us | ratio | quartiles |",
        "|---|---|---|---|---|",
    ]
    for case, row in found.items():
        quartiles = f"{row['ratio_p25']:.2f} to {row['ratio_p75']:.2f}"
        lines.append(f"| {case} | {row['before_us']:.1f} | {row['after_us']:.1f} | {row['ratio']:.2f} | {quartiles} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.before is None:
        parser.error("--before is needed")
    here, there = Path(__file__).resolve().parents[1], arguments.before.resolve()
    before, after = Side(there / ".venv/bin/python", there), Side(Path(sys.executable), here)
    try:
        found = compare(before, after, arguments.rounds)
    finally:
        before.close()
        after.close()
    log = subprocess.run(
        ["git", "-C", str(there), "log", "-1", "--format=%h"], capture_output=True, text=True, check=True
    )
    text = report(found, log.stdout.strip(), arguments.rounds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "decision_pair.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "decision_pair.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
