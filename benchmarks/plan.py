"""The planner's hit rates against those that simulated vLLM servers report.

    python -m benchmarks.plan            # writes benchmarks/reports/plan.md and plan.json; a quarter of an hour

`kvproxy plan` plays a trace in virtual time. Here the same requests are sent, as text over HTTP, through the proxy to
simulated vLLM servers with caches of the planned sizes; their reported cached tokens are compared. The servers have
tokens of their own and blocks of 16, and the proxy has only its routed requests and their KV events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.report import machine
from kvproxy.app import Proxy
from kvproxy.lab.planner.traffic import Row, TrafficPlan, play_sizes
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.live import LiveReplay, LiveSettings
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.settings import ENGINES, Pace, ReplayFleet, make_prompt
from kvproxy.lab.replay.trace import Trace, read_trace
from kvproxy.lab.served import serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import FleetSettings, clone_engines
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

HERE = Path(__file__).parent
LOAD, ENGINES_COUNT = 0.5, 2
BLOCK = 16  # of the servers
#: Trace, its first requests, and the cache of an engine that 1x is.
CASES = (("agent_dev", 500, 40_000), ("toolagent_like_dev", 400, 200_000))
SHARES = (0.5, 1.0, 2.0)
#: Real seconds for a virtual one.
TIME_SCALE = 0.7


@dataclass(frozen=True, slots=True)
class Measured:
    """Reports of the servers for one size."""

    hit_rate: float
    requests: int
    failed: int


def count_tokens_per_word(trace: Trace) -> float:
    """How many tokens the servers make of one of the trace: their caches hold as many more."""
    tokenizer, turns = Tokenizer(), [session.turns[-1] for session in trace.sessions[:40]]
    texts = [make_prompt(turn, trace.block_size) for turn in turns]
    return sum(len(tokenizer.encode(text)) for text in texts) / sum(turn.prompt_tokens for turn in turns)


def _engine(fleet: ReplayFleet, scale: float) -> EngineSettings:
    """As fast with its own tokens as the planner's is with those of the trace."""
    settings = fleet.engine_settings(BLOCK, 0, 0.0)
    timing = replace(
        settings.timing,
        prefill_tokens_per_s=settings.timing.prefill_tokens_per_s * scale,
        quadratic_tokens=settings.timing.quadratic_tokens * scale,
        time_scale=TIME_SCALE,
    )
    batched = int(settings.max_batched_tokens * scale)
    return replace(settings, timing=timing, max_batched_tokens=batched, token_outputs=True)


def _at_pace(trace: Trace, pace: Pace) -> Trace:
    """Sessions start as they do in virtual time, and within one the pauses stay what they are: a live replay scales
    both alike."""
    sessions = tuple([replace(each, start_s=each.start_s * pace.scale) for each in trace.sessions])
    return replace(trace, sessions=sessions)


async def measure(trace: Trace, pace: Pace, fleet: ReplayFleet, tokens: int) -> Measured:
    """One run over HTTP."""
    scale = count_tokens_per_word(trace)
    engine = _engine(replace(fleet, capacity_tokens=int(tokens * scale)), scale)
    server = VllmSettings(model="sim", engine=engine, kv_events=PublisherSettings(), max_model_len=1_000_000)
    async with contextlib.AsyncExitStack() as stack:
        fleet_settings = FleetSettings(clone_engines(server, fleet.instances), controller=None)
        urls = (await stack.enter_async_context(serve_fleet(fleet_settings, rng=Random(7)))).engines
        raw = {"endpoints": urls, "policy": "kv_aware", "limits": {"body": "64MiB"}}
        filters = ["request_id", "inference_request", {"kvcache": {"kv_events": True}}, "router"]
        proxy = await stack.enter_async_context(Proxy(load_config({**raw, "filters": filters}), rng=Random(7)))
        public = await stack.enter_async_context(Server(proxy))
        live = LiveReplay(_at_pace(trace, pace), Pace(TIME_SCALE), LiveSettings(public.url, model="sim"))
        outcomes = await live.run()
    summary = summarize_outcomes(outcomes, fleet.instances)
    return Measured(summary.hit_rate, summary.requests, summary.failed)


def main() -> int:
    """Both, for each trace and size, and the report."""
    about = machine(2, "python -m benchmarks.plan")
    rows, lines = [], []
    for name, requests, tokens in CASES:
        trace = read_trace(HERE / "traces" / f"{name}.jsonl.gz").cut(requests)
        fleet = replace(ENGINES["h100"], instances=ENGINES_COUNT, capacity_tokens=tokens, reuse_outputs=False)
        plan = TrafficPlan(trace, fleet, PolicySpec.parse("kv_aware"), LOAD, SHARES)
        bound = measure_bound(trace, fleet, LOAD)
        for row in play_sizes(plan, err=sys.stderr):
            measured = asyncio.run(measure(bound.trace, bound.pace, fleet, row.tokens))
            rows.append({"trace": name, "tokens": row.tokens, "predicted": row.summary.hit_rate, **asdict(measured)})
            lines.append(_line(name, row, measured))
            print(lines[-1], flush=True)
    worst = max(abs(row["predicted"] - row["hit_rate"]) for row in rows)
    (HERE / "reports" / "plan.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (HERE / "reports" / "plan.md").write_text(_page(lines, worst, about))
    return 0


def _line(name: str, row: Row, measured: Measured) -> str:
    points = 100 * (row.summary.hit_rate - measured.hit_rate)
    return (
        f"| {name} | {measured.requests} | {row.name} | {row.tokens:,} | {row.summary.hit_rate:.3f} | "
        f"{measured.hit_rate:.3f} | {points:+.1f} | {measured.failed} |"
    )


def _page(lines: list[str], worst: float, about: dict[str, str]) -> str:
    return "\n".join(
        [
            "# What the planner predicts, and what servers report",
            "",
            *(f"- {name}: {value}" for name, value in about.items()),
            "",
            f"`kvproxy plan` in virtual time, and the same requests over HTTP through `kv_aware` to {ENGINES_COUNT} "
            f"simulated vLLM servers, load {LOAD}.",
            f"Share of prompt tokens found in cache; at most {100 * worst:.1f} points apart.",
            "Pauses within a session are the same in both. (Before, the servers' were scaled as the starts of sessions "
            "are, to a quarter on agent_dev: another traffic, 6.6 points off.)",
            "",
            "| trace | requests | cache | tokens an engine | predicted | measured | points | failed |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
