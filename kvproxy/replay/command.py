"""`kvproxy replay`: what it runs, prints and writes (options.py has its options)."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, replace
from typing import TextIO

import httpx

from kvproxy.errors import KvproxyError
from kvproxy.receipts.reading import Reading
from kvproxy.replay.compare import Comparison, Plan, compare
from kvproxy.replay.decided import decide_again
from kvproxy.replay.live import LiveReplay, LiveSettings
from kvproxy.replay.options import DEFAULT_POLICIES
from kvproxy.replay.outcome import summarise
from kvproxy.replay.plot import as_html
from kvproxy.replay.progress import ProgressBar
from kvproxy.replay.report import Report
from kvproxy.replay.scenario import PolicySpec
from kvproxy.replay.settings import FleetSettings, Pace
from kvproxy.replay.trace import Trace, read_trace
from kvproxy.simulator.timing import EngineTiming


def run(
    args: argparse.Namespace, *, out: TextIO, err: TextIO, transport: httpx.AsyncBaseTransport | None = None
) -> int:
    """Runs the command; its exit status. `transport` carries a live run's requests."""
    try:
        if args.receipts or not args.trace:
            return _receipts(args, out)
        trace = read_trace(args.trace)
        trace = trace.first(args.requests) if args.requests else trace
        comparison = _live(trace, args, err, transport=transport) if args.url else compare(trace, _plan(args), err=err)
    except (KvproxyError, OSError, ValueError, httpx.HTTPError) as error:
        print(f"kvproxy replay: {error}", file=err)
        return 1
    print(comparison.report.as_table(), file=out)
    if args.json:
        args.json.write_text(json.dumps(comparison.report.as_json(), indent=2) + "\n")
    if args.plot:
        args.plot.write_text(as_html(comparison.report, comparison.ttft_s))
    return 0


def _receipts(args: argparse.Namespace, out: TextIO) -> int:
    if args.trace or not args.receipts or args.url:
        raise ValueError("one of TRACE and --receipts FILE is needed, and --url goes with a TRACE")
    wanted = [PolicySpec.parse(text) for text in args.policy.split(",")]
    policies = [spec for spec in wanted if not spec.queue]
    if len(policies) < len(wanted) and args.policy != DEFAULT_POLICIES:
        raise ValueError("receipts tell where requests went, not when: the router queue cannot be replayed from them")
    review = decide_again(Reading(args.receipts), policies, limit=args.requests)
    print(review.as_table(), file=out)
    if args.json:
        args.json.write_text(json.dumps(review.as_json(), indent=2) + "\n")
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
        learn_capacity=not args.fixed_capacity,
        wrong_share=args.wrong,
    )
    return Plan(fleet, policies, load=args.load, baseline=args.baseline, seeds=args.seeds,
                closed_loop=not args.open_loop, prior_factor=args.prior_factor)  # fmt: skip


def _live(
    trace: Trace, args: argparse.Namespace, err: TextIO, *, transport: httpx.AsyncBaseTransport | None
) -> Comparison:
    """One row: whatever policy the server has."""
    bar = ProgressBar(trace.requests, out=err)
    bar.begin(args.url)
    settings = LiveSettings(args.url, model=args.model, api_key=args.api_key, concurrency=args.concurrency)
    replay = LiveReplay(trace, Pace(scale=args.pace), settings, transport=transport, progress=bar.advance)
    outcomes = asyncio.run(replay.run())
    bar.close()
    summary = summarise(outcomes, max(1, len(replay.endpoints)))
    settings = replace(settings, api_key="")
    report = Report(trace.name, len(replay.endpoints), 0.0, trace.requests, trace.hit_ceiling(), 0.0, 0.0, "live",
                    {"live": summary}, {"live": asdict(settings), "pace": args.pace})  # fmt: skip
    return Comparison(report, {"live": sorted(each.ttft_s for each in outcomes if each.ttft_s is not None)})
