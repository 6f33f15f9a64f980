"""`kvproxy replay`: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

import httpx

from kvproxy.errors import KvproxyError
from kvproxy.replay.compare import Comparison, Plan, compare
from kvproxy.replay.live import LiveReplay, LiveSettings
from kvproxy.replay.outcome import summarise
from kvproxy.replay.plot import as_html
from kvproxy.replay.progress import ProgressBar
from kvproxy.replay.report import Report
from kvproxy.replay.scenario import PolicySpec
from kvproxy.replay.settings import FleetSettings, IndexMode, Pace
from kvproxy.replay.trace import Trace, read_trace
from kvproxy.simulator.timing import EngineTiming

DEFAULT_POLICIES = "dynamo,lmetric,least_ttft,kv_aware,kv_aware+queue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvproxy replay`."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace (see benchmarks/traces/), gzipped or not")
    parser.add_argument("--policy", default=DEFAULT_POLICIES, metavar="P,P...", help="policies, side by side; "
                        "+queue behind kv_aware or least_ttft adds the router queue (default %(default)s)")  # fmt: skip
    parser.add_argument("--baseline", default="", metavar="P", help="policy of the last column (default: the first)")
    parser.add_argument("--instances", type=int, default=8, metavar="N", help="engines (default %(default)s)")
    parser.add_argument("--load", type=float, default=0.7, metavar="X",
                        help="share of the pooled cache's saturated throughput (default %(default)s)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="runs to average (default %(default)s)")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="only the first N requests")
    parser.add_argument("--open-loop", action="store_true", help="turns come at fixed times, whatever became of others")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an HTML page with plots")
    _add_engine_options(parser.add_argument_group("engines"))
    _add_knowledge_options(parser.add_argument_group("what the router knows"))
    live = parser.add_argument_group("live", "real requests instead of virtual time")
    live.add_argument("--url", metavar="URL", help="send the trace's shape to this proxy or engine")
    live.add_argument("--model", default="", help="model to ask for (default: the first the server lists)")
    live.add_argument("--api-key", default="", help="sent as a bearer token")
    live.add_argument("--pace", type=float, default=1.0, metavar="X", help="multiplies the trace's times")
    live.add_argument("--concurrency", type=int, default=256, help="requests under way at once (default %(default)s)")


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    timing = EngineTiming()
    group.add_argument("--capacity-tokens", type=int, default=FleetSettings().capacity_tokens, metavar="N",
                       help="KV cache of each (default %(default)s)")  # fmt: skip
    group.add_argument("--prefill-tokens-per-s", type=float, default=timing.prefill_tokens_per_s, metavar="X")
    group.add_argument("--quadratic-tokens", type=float, default=timing.quadratic_tokens, metavar="X",
                       help="depth at which attention doubles a token's time (default %(default)s)")  # fmt: skip
    group.add_argument("--decode-step", type=float, default=timing.decode_step_s, metavar="S")
    group.add_argument("--slow", default="", metavar="F,F...", help="slowness of the first engines (2: half as fast)")
    group.add_argument("--slow-middle", type=float, default=1.0, metavar="F",
                       help="slowness of the first engine in the middle third of the run")  # fmt: skip


def _add_knowledge_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--index", choices=list(IndexMode), type=IndexMode, default=IndexMode.EVENTS,
                       help="KV events, or only what was routed (default %(default)s)")  # fmt: skip
    group.add_argument("--index-delay", type=float, default=0.0, metavar="S", help="events come this late")
    group.add_argument("--index-capacity", type=float, default=1.0, metavar="X",
                       help="what the approximate index believes of the true capacity")  # fmt: skip
    group.add_argument("--wrong", type=float, default=0.0, metavar="X",
                       help="share of the index's entries that are false")  # fmt: skip
    group.add_argument("--prior-factor", type=float, default=1.0, metavar="X", help="error of the prior speeds")


def run(args: argparse.Namespace, *, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Runs the command; its exit status."""
    try:
        trace = read_trace(args.trace)
        trace = trace.first(args.requests) if args.requests else trace
        comparison = _live(trace, args, err) if args.url else compare(trace, _plan(args), err=err)
    except (KvproxyError, OSError, ValueError, httpx.HTTPError) as error:
        print(f"kvproxy replay: {error}", file=err)
        return 1
    print(comparison.report.as_table(), file=out)
    if args.json:
        args.json.write_text(json.dumps(comparison.report.as_json(), indent=2) + "\n")
    if args.plot:
        args.plot.write_text(as_html(comparison.report, comparison.ttft_s))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    policies = [PolicySpec.parse(text) for text in args.policy.split(",")]
    if args.baseline and args.baseline not in map(str, policies):
        raise ValueError(f"the baseline {args.baseline} is not among the policies")
    if args.instances < 1 or args.seeds < 1 or args.load <= 0 or not 0 <= args.wrong < 1:
        raise ValueError("--instances and --seeds are at least 1, --load is above 0, --wrong is from 0 to below 1")
    timing = EngineTiming(
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        quadratic_tokens=args.quadratic_tokens,
        decode_step_s=args.decode_step,
    )
    fleet = FleetSettings(
        instances=args.instances,
        capacity_tokens=args.capacity_tokens,
        timing=timing,
        slowness=tuple(float(each) for each in args.slow.split(",") if each),
        slow_middle=args.slow_middle,
        index=args.index,
        index_delay_s=args.index_delay,
        index_capacity=args.index_capacity,
        wrong_share=args.wrong,
    )
    return Plan(fleet, policies, load=args.load, baseline=args.baseline, seeds=args.seeds,
                closed_loop=not args.open_loop, prior_factor=args.prior_factor)  # fmt: skip


def _live(trace: Trace, args: argparse.Namespace, err: TextIO) -> Comparison:
    """One row: whatever policy the server has."""
    bar = ProgressBar(trace.requests, out=err)
    bar.begin(args.url)
    settings = LiveSettings(args.url, model=args.model, api_key=args.api_key, concurrency=args.concurrency)
    replay = LiveReplay(trace, Pace(scale=args.pace), settings, progress=bar.advance)
    outcomes = asyncio.run(replay.run())
    bar.close()
    summary = summarise(outcomes, max(1, len(replay.endpoints)))
    settings = replace(settings, api_key="")
    report = Report(trace.name, len(replay.endpoints), 0.0, trace.requests, trace.hit_ceiling(), 0.0, 0.0, "live",
                    {"live": summary}, {"live": asdict(settings), "pace": args.pace})  # fmt: skip
    return Comparison(report, {"live": sorted(each.ttft_s for each in outcomes if each.ttft_s is not None)})
