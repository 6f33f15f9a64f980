"""The options of `kvproxy replay`; apart from the command, so that parsing a command line loads little."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvproxy.replay.results import GoodputLimits
from kvproxy.replay.settings import IndexMode, ReplayFleet
from kvproxy.replay.trace import Half
from kvproxy.simulator.timing import EngineTiming

DEFAULT_POLICIES = "dynamo,lmetric,least_ttft,kv_aware,kv_aware+queue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvproxy replay`."""
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE",
                        help="a trace (see benchmarks/traces/), gzipped or not")  # fmt: skip
    parser.add_argument("--receipts", type=Path, metavar="FILE",
                        help="instead of a trace: decide recorded decisions again")  # fmt: skip
    parser.add_argument("--policy", default=DEFAULT_POLICIES, metavar="P,P...", help="policies, side by side; "
                        "behind kv_aware or least_ttft, +queue adds the router queue, +priority has engines "
                        "admit in the router's order (default %(default)s)")  # fmt: skip
    parser.add_argument("--baseline", default="", metavar="P", help="policy of the last column (default: the first)")
    parser.add_argument("--instances", type=int, default=8, metavar="N", help="engines (default %(default)s)")
    parser.add_argument("--load", type=float, default=0.7, metavar="X",
                        help="share of their throughput with one pooled cache (default %(default)s)")  # fmt: skip
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="K",
        help="runs to average; from the second on, "
        "sessions start up to half a second later than in the trace (default %(default)s)",
    )
    parser.add_argument("--streamed", type=float, default=1.0, metavar="X", help="share of the answers that are "
                        "streamed; the router sees no first token of the others (default %(default)s)")  # fmt: skip
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        metavar="N",
        help="only the first N requests of the trace; in virtual time a "
        "short one is repeated, each time with prefixes of its own, until the figures are steady",
    )
    parser.add_argument("--half", choices=list(Half), type=Half, default=Half.BOTH, help="only this half of the "
                        "conversations: constants are tuned on one half, figures reported on the other")  # fmt: skip
    parser.add_argument("--open-loop", action="store_true", help="turns come at fixed times, whatever became of others")
    goodput = GoodputLimits()
    parser.add_argument("--goodput-ttft", type=float, default=goodput.ttft_s, metavar="S",
                        help="an answer is good with its first token before this (default %(default)s)")  # fmt: skip
    parser.add_argument("--goodput-tpot", type=float, default=goodput.tpot_s, metavar="S",
                        help="and less than this per token after it, on average (default %(default)s)")  # fmt: skip
    parser.add_argument("--all-figures", action="store_true", help="a second table: TTFT p90 and the longest, e2e p99, "
                        "TPOT, session completion time, fairness")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an HTML page with plots (FILE.html)")
    _add_engine_options(parser.add_argument_group("engines"))
    _add_knowledge_options(parser.add_argument_group("what the router knows"))
    live = parser.add_argument_group("live", "real requests instead of virtual time")
    live.add_argument("--url", metavar="URL", help="send the trace's shape to this proxy or engine")
    live.add_argument("--model", default="", help="model to ask for (default: the first the server lists)")
    live.add_argument("--api-key", default="", help="sent as a bearer token")
    live.add_argument(
        "--pace", type=float, default=1.0, metavar="X", help="multiplies the trace's times (default %(default)s)"
    )
    live.add_argument("--concurrency", type=int, default=256, help="requests under way at once (default %(default)s)")


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    timing = EngineTiming()
    group.add_argument("--capacity-tokens", type=int, default=ReplayFleet().capacity_tokens, metavar="N",
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
                       help="what the approximate index is told of the true capacity")  # fmt: skip
    group.add_argument("--fixed-capacity", action="store_true",
                       help="do not correct that by what engines reuse (with --index approximate)")  # fmt: skip
    group.add_argument("--wrong", type=float, default=0.0, metavar="X",
                       help="share of the index's entries that are false")  # fmt: skip
    group.add_argument("--prior-factor", type=float, default=1.0, metavar="X", help="error of the prior speeds")
