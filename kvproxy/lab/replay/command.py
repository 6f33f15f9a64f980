"""`kvproxy replay`: what it runs, prints and writes (options.py has its options)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

import httpx

from kvproxy.base.errors import KvproxyError, describe_os_error
from kvproxy.lab.replay.batch import compare_batch
from kvproxy.lab.replay.compare import ComparisonPlan, PolicySpec, compare
from kvproxy.lab.replay.live import LiveReplay, LiveSettings
from kvproxy.lab.replay.options import DEFAULT_LOAD, DEFAULT_POLICIES
from kvproxy.lab.replay.plot import render_html
from kvproxy.lab.replay.recorded_decisions import decide_again
from kvproxy.lab.replay.replicas import RoutersPlan
from kvproxy.lab.replay.report import ROW, LiveReport, report_live
from kvproxy.lab.replay.results import GoodputLimits
from kvproxy.lab.replay.scenarios import find_scenarios, list_scenarios
from kvproxy.lab.replay.session_rules import BEST_PLACES
from kvproxy.lab.replay.settings import ENGINES, Pace, ReplayFleet, TierPlan
from kvproxy.lab.replay.trace import Trace, read_trace
from kvproxy.lab.replay.transfers import LinkPlan
from kvproxy.operate.commands.progress import ProgressBar
from kvproxy.operate.receipts.files import ReceiptReader

#: As shells have it for a program that Ctrl-C ended.
INTERRUPTED = 130


def main(args: argparse.Namespace) -> int:
    """`kvproxy replay`."""
    return run(args, out=sys.stdout, err=sys.stderr)


def run(
    args: argparse.Namespace, *, out: TextIO, err: TextIO, transport: httpx.AsyncBaseTransport | None = None
) -> int:
    """Run the command; its exit status. `transport` carries a live run's requests."""
    try:
        if args.plot and args.plot.suffix.casefold() not in (".html", ".htm"):
            raise ValueError(f"--plot writes an HTML page: name it {args.plot.with_suffix('.html')}")
        if args.url or args.receipts:
            _refuse_routers(args)
        _check_batch(args)
        if args.scenario:
            return _scenarios(args, out, err)
        if args.receipts or not args.trace:
            return _receipts(args, out)
        trace = _read(args)
        if args.url:
            return _live(trace, args, out, err, transport=transport)
        if args.once:
            return _batch(trace, args, out, err)
        comparison = compare(trace, _plan(args), err=err)
    except (KvproxyError, OSError, ValueError, httpx.HTTPError) as error:
        print(f"kvproxy replay: {describe_os_error(error) if isinstance(error, OSError) else error}", file=err)
        return 1
    print(comparison.report.render_table(all_figures=args.all_figures), file=out)
    _write_json(args, comparison.report.as_json())
    if args.plot:
        args.plot.write_text(render_html(comparison.report, comparison.ttft_s))
    return 0


def _write_json(args: argparse.Namespace, report: object) -> None:
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def _read(args: argparse.Namespace) -> Trace:
    trace = read_trace(args.trace).take_half(args.half)
    return trace.cut(args.requests) if args.requests else trace


def _refuse_routers(args: argparse.Namespace) -> None:
    several = args.routers is not None or args.delay is not None or args.no_exchange
    if several or args.prefill is not None or args.decode is not None:
        raise ValueError(
            "--routers, --delay, --no-exchange, --prefill and --decode are of virtual time: they go with neither --url "
            "nor --receipts"
        )


def _check_batch(args: argparse.Namespace) -> None:
    if args.sessions_at_once and not args.once:
        raise ValueError("--sessions-at-once is of a batch: add --once")
    if args.sessions_at_once < 0 or (args.sessions_at_once and args.open_loop):
        raise ValueError("--sessions-at-once is at least 1, and not with --open-loop, where turns wait for no answer")
    if args.once and (args.scenario or args.url or args.receipts or args.plot or args.load is not None):
        raise ValueError(
            "--once plays a TRACE at its own pace in virtual time: it goes with none of --load, --scenario, --url, "
            "--receipts and --plot"
        )


def _batch(trace: Trace, args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    report = compare_batch(trace, _plan(args), sessions_at_once=args.sessions_at_once, err=err)
    print(report.render_table(), file=out)
    _write_json(args, report.as_json())
    return 0


def _scenarios(args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """One after the other, each with its own load unless one is given."""
    if args.scenario == "list":
        print(list_scenarios(), file=out)
        return 0
    if args.url or args.receipts or args.plot:
        raise ValueError("--scenario goes with neither --url, --receipts nor --plot")
    reports = []
    for scenario in find_scenarios(args.scenario):
        if args.trace and not scenario.any_trace:
            raise ValueError(f"{scenario.name} is a workload of its own: leave the TRACE out")
        trace = _read(args) if args.trace else scenario.draw(args.half)
        if args.trace:
            trace = replace(trace, name=f"{trace.name} with {scenario.name}")
        elif args.requests:
            trace = trace.cut(args.requests)
        plan = _plan(args, load=scenario.load)
        report = compare(trace, replace(plan, fleet=scenario.disturb(plan.fleet)), err=err).report
        print(f"{scenario.name}: {scenario.what}\n{report.render_table(all_figures=args.all_figures)}\n", file=out)
        reports.append(report.as_json())
    _write_json(args, reports[0] if len(reports) == 1 else {"scenarios": reports})
    return 0


def _receipts(args: argparse.Namespace, out: TextIO) -> int:
    if args.trace or not args.receipts or args.url:
        raise ValueError("one of TRACE, --scenario and --receipts FILE is needed, and --url goes with a TRACE")
    wanted = args.policy.split(",")
    plain = [text for text in wanted if "+" not in text]
    policies = [PolicySpec.parse(text) for text in plain]
    if len(policies) < len(wanted) and args.policy != DEFAULT_POLICIES:
        raise ValueError(
            "receipts record where requests went, not when: the router queue, engine priority and tier blindness "
            "cannot be replayed from them"
        )
    review = decide_again(ReceiptReader(args.receipts), policies, limit=args.requests)
    print(review.render_table(), file=out)
    _write_json(args, review.as_json())
    return 0


def _plan(args: argparse.Namespace, *, load: float = DEFAULT_LOAD) -> ComparisonPlan:
    load = load if args.load is None else args.load
    policies = list(dict.fromkeys(map(PolicySpec.parse_run, args.policy.split(","))))
    if args.baseline and args.baseline not in map(str, policies):
        raise ValueError(f"the baseline {args.baseline} is not among the policies")
    if args.instances < 1 or args.seeds < 1 or load <= 0:
        raise ValueError("--instances and --seeds are at least 1, --load is above 0")
    if not 0 <= args.streamed <= 1:
        raise ValueError("--streamed is a share, from 0 to 1")
    routers = _routers(args)
    if routers.count > 1 and any(spec.move for spec in policies):
        raise ValueError("+move needs a single router: copies are not reported to others (leave out --routers)")
    if not args.once and any(spec.sessions == BEST_PLACES for spec in policies):
        raise ValueError("places is the best number for a batch: add --once, or give a number, as in places=8")
    if routers.count > 1 and any(spec.sessions for spec in policies):
        raise ValueError("rules of sessions need a single router, which knows all of them (leave out --routers)")
    fleet = replace(
        engines(args),
        instances=_check_roles(args, policies, routers),
        prefill=args.prefill,
        slowness=_slowness(args.slow),
        joins=_moments("--join", args.join),
        leaves=_moments("--leave", args.leave),
        index=args.index,
        tiers=TierPlan.parse(args.tiers) if args.tiers else None,
        eviction=args.eviction,
        link=LinkPlan(args.link),
    )
    return ComparisonPlan(
        fleet,
        policies,
        load=load,
        baseline=args.baseline,
        seeds=args.seeds,
        closed_loop=not args.open_loop,
        streamed=args.streamed,
        goodput=GoodputLimits(args.goodput_ttft, args.goodput_tpot),
        routers=routers,
    )


def _check_roles(args: argparse.Namespace, policies: Sequence[PolicySpec], routers: RoutersPlan) -> int:
    """Return the number of engines."""
    if args.prefill is None and args.decode is None:
        if any(spec.apart for spec in policies):
            raise ValueError("+apart= is about engines that prefill for others: add --prefill N --decode M")
        return int(args.instances)
    if args.prefill is None or args.decode is None or args.prefill < 0 or args.decode < 1:
        raise ValueError(
            "--prefill N and --decode M go together: engines that prefill, from 0, and that answer, from 1"
        )
    if routers.count > 1 or any(spec.move or spec.sessions for spec in policies):
        raise ValueError("--prefill goes with none of --routers, +move and rules of sessions")
    return int(args.prefill + args.decode)


def _routers(args: argparse.Namespace) -> RoutersPlan:
    if args.routers is None and (args.delay is not None or args.no_exchange):
        raise ValueError("--delay and --no-exchange need several routers: add --routers N")
    if args.delay is not None and args.no_exchange:
        raise ValueError("--delay delays the routers' messages, --no-exchange drops them: give one")
    count = 1 if args.routers is None else args.routers
    if args.no_exchange:
        return RoutersPlan(count, None)
    return RoutersPlan(count) if args.delay is None else RoutersPlan(count, args.delay / 1000)


def engines(args: argparse.Namespace) -> ReplayFleet:
    """Return the engines of `--engine`, with what the other options change of them."""
    preset = ENGINES[args.engine]
    timing = {
        "prefill_tokens_per_s": args.prefill_tokens_per_s,
        "prefill_floor_s": args.prefill_floor,
    }
    settings = {
        "capacity_tokens": args.capacity_tokens,
        "block_size": args.block_size,
        "max_batched_tokens": args.max_num_batched_tokens,
        "max_sequences": args.max_num_seqs,
        "long_prefill_token_threshold": args.long_prefill_token_threshold,
        "reuse_outputs": args.reuse_outputs,
    }
    return replace(preset, **_given(settings), timing=replace(preset.timing, **_given(timing)))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _moments(option: str, text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [each.split(":") for each in text.split(",") if each]
        return tuple((int(engine), float(share)) for engine, share in pairs)
    except ValueError:
        raise ValueError(f"{option} takes engines and shares of the run, such as 0:0.5,3:0.7; not {text!r}") from None


def _slowness(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(",") if each)
    except ValueError:
        raise ValueError(f"--slow takes numbers with commas between them, such as 2,1.5; not {text!r}") from None


def _live(
    trace: Trace, args: argparse.Namespace, out: TextIO, err: TextIO, *, transport: httpx.AsyncBaseTransport | None
) -> int:
    """One row: whatever policy the server has. Ctrl-C leaves the report of what ended before it."""
    if args.concurrency < 1 or args.pace < 0:
        raise ValueError("--concurrency is at least 1, --pace is not negative")
    bar = ProgressBar(trace.requests, out=err)
    bar.begin(args.url)
    settings = LiveSettings(args.url, model=args.model, api_key=args.api_key, concurrency=args.concurrency)
    pace = Pace(scale=args.pace, closed_loop=not args.open_loop)
    replay = LiveReplay(trace, pace, settings, transport=transport, progress=bar.advance)
    interrupted = False
    try:
        asyncio.run(replay.run())
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
    limits = GoodputLimits(args.goodput_ttft, args.goodput_tpot)
    report = report_live(trace, replay, settings, pace, interrupted=interrupted, limits=limits)
    _write_live(report, args, out, [each.ttft_s for each in replay.outcomes if each.ttft_s is not None])
    if report.summary.requests == report.summary.failed:
        print("kvproxy replay: no request was answered", file=err)
        return INTERRUPTED if interrupted else 1
    return INTERRUPTED if interrupted else 0


def _write_live(report: LiveReport, args: argparse.Namespace, out: TextIO, ttft_s: list[float]) -> None:
    print(report.render_table(all_figures=args.all_figures), file=out)
    _write_json(args, report.as_json())
    if args.plot:
        args.plot.write_text(render_html(report.played, {ROW: sorted(ttft_s)}))
