"""The options of `kvproxy replay`; apart from the command, so that parsing a command line loads little."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from kvproxy.lab.replay.results import GoodputLimits
from kvproxy.lab.replay.settings import ENGINES, IndexMode, ReplayFleet
from kvproxy.lab.replay.tier_plan import TierPlan
from kvproxy.lab.replay.trace import Half
from kvproxy.lab.simulator.retention import Eviction
from kvproxy.lab.simulator.timing import EngineTiming

DEFAULT_LOAD = 0.7
_DYNAMO = "dynamo," if find_spec("kvproxy.features.published") else ""
DEFAULT_POLICIES = f"{_DYNAMO}lmetric,least_ttft,kv_aware"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvproxy replay`."""
    parser.add_argument(
        "trace", type=Path, nargs="?", metavar="TRACE", help="a trace (see benchmarks/traces/), gzipped or not"
    )
    parser.add_argument(
        "--receipts", type=Path, metavar="FILE", help="instead of a trace: decide recorded decisions again"
    )
    parser.add_argument(
        "--scenario",
        default="",
        metavar="S,S...",
        help="a workload with its load, or a disturbance of a fleet (then also on a TRACE); `list` prints them all",
    )
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICIES,
        metavar="P,P...",
        help="policies, side by side; "
        "kv_aware has the router queue, +no_queue takes it away, +no_admission the rule by which "
        "sessions wait for room; behind least_ttft +queue "
        "adds it; behind both, +priority has engines "
        "admit in the router's order; behind kv_aware, +move copies KV between engines on demand "
        "(--link); +apart=RULE computes prompts apart (--prefill) by always, never, dynamo or llm_d in place of the "
        "expected first token; behind any, +tier_blind hides tiers below engine memory; places=N admits N sessions on "
        "each engine, to their end; module:Rule is a rule of your own that admits sessions "
        "(default %(default)s)",
    )
    parser.add_argument("--baseline", default="", metavar="P", help="policy of the last column (default: the first)")
    parser.add_argument("--instances", type=int, default=8, metavar="N", help="engines (default %(default)s)")
    parser.add_argument(
        "--load",
        type=float,
        metavar="X",
        help=f"share of their throughput with one pooled cache (default {DEFAULT_LOAD}, or the scenario's)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="play the trace once, at its own pace, and report on sessions: how many end an hour, how long they take "
        "and wait",
    )
    parser.add_argument(
        "--sessions-at-once",
        type=int,
        default=0,
        metavar="N",
        help="with --once: at most N sessions are under way, further ones begin as others end (default: no bound)",
    )
    _add_run_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an HTML page with plots (FILE.html)")
    engines = parser.add_argument_group("engines")
    _add_engine_options(engines)
    _add_memory_options(engines)
    _add_role_options(engines)
    _add_timing_options(engines)
    _add_knowledge_options(parser.add_argument_group("the router's view of the caches"))
    _add_router_options(parser.add_argument_group("several routers", "workers or replicas"))
    _add_live_options(parser.add_argument_group("live", "real requests instead of virtual time"))


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="K",
        help="runs to average; in each, sessions start up to "
        "half a second later than in the trace (default %(default)s)",
    )
    parser.add_argument(
        "--streamed",
        type=float,
        default=1.0,
        metavar="X",
        help="share of the answers that are "
        "streamed; the router sees no first token of the others (default %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        metavar="N",
        help="only the first N requests of the trace; in virtual time a "
        "short one is repeated, each time with prefixes of its own, until the figures are steady",
    )
    parser.add_argument(
        "--half",
        choices=list(Half),
        type=Half,
        default=Half.BOTH,
        help="only this half of the conversations: constants are tuned on one half, figures reported on the other",
    )
    parser.add_argument(
        "--open-loop", action="store_true", help="turns come at fixed times, independent of earlier answers"
    )
    goodput = GoodputLimits()
    parser.add_argument(
        "--goodput-ttft",
        type=float,
        default=goodput.ttft_s,
        metavar="S",
        help="an answer is good with its first token before this (default %(default)s)",
    )
    parser.add_argument(
        "--goodput-tpot",
        type=float,
        default=goodput.tpot_s,
        metavar="S",
        help="and less than this per token after it, on average (default %(default)s)",
    )
    parser.add_argument(
        "--all-figures",
        action="store_true",
        help="a second table: TTFT p90 and the longest, e2e p99, TPOT, session completion time, fairness",
    )


def _add_live_options(live: argparse._ArgumentGroup) -> None:
    live.add_argument("--url", metavar="URL", help="send the trace's shape to this proxy or engine")
    live.add_argument("--model", default="", help="model to request (default: the first the server lists)")
    live.add_argument("--api-key", default="", help="sent as a bearer token")
    live.add_argument(
        "--pace", type=float, default=1.0, metavar="X", help="multiplies the trace's times (default %(default)s)"
    )
    live.add_argument("--concurrency", type=int, default=256, help="requests under way at once (default %(default)s)")


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    fleet = ReplayFleet()
    group.add_argument(
        "--engine",
        choices=list(ENGINES),
        default="default",
        help="defaults of the other options: h100 has the defaults of a vLLM server there, 8192 tokens "
        "a step and 1024 sequences, steps of 8 ms at least, and reuses answers",
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help=f"tokens a step (default {fleet.max_batched_tokens})"
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help=f"sequences at once (default {fleet.max_sequences})"
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        help="most tokens a step of one prompt among others (default: no bound)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="of the engines' caches, a part of the trace's "
        "blocks; small ones take milliseconds a request (default: as in the trace)",
    )
    group.add_argument(
        "--prefill-floor", type=float, metavar="S", help="least time of a step without decodes (default 0)"
    )
    group.add_argument(
        "--reuse-outputs",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the next turn finds the blocks of an answer, as with vLLM",
    )


def _add_memory_options(group: argparse._ArgumentGroup) -> None:
    fleet = ReplayFleet()
    group.add_argument(
        "--capacity-tokens", type=int, metavar="N", help=f"KV cache of each (default {fleet.capacity_tokens})"
    )
    more = ", ".join(name for name in TierPlan.NAMES if name not in ("device", "host", "gbps"))
    group.add_argument(
        "--tiers",
        default="",
        metavar="NAME=X,...",
        help="tiers below engine memory: device=0.25,host=4,gbps=20 leaves a quarter of it, with "
        f"host memory of four times that, read at 20 GB/s (a token's KV is 128 KiB); docs/replay.md describes {more}",
    )
    group.add_argument(
        "--eviction",
        choices=list(Eviction),
        type=Eviction,
        default=Eviction.LRU,
        help="eviction order of engines and tiers; optimum uses the future (default %(default)s)",
    )
    group.add_argument(
        "--link",
        type=float,
        default=12.5,
        metavar="GBPS",
        help="link for copies of +move, each way of each engine (default %(default)s; a token's KV is "
        "128 KiB; below 1 nothing is copied)",
    )
    group.add_argument(
        "--no-link-wait",
        action="store_true",
        help="requests wait for no copy: it is made while the router queue holds them, as by the proxy",
    )


def _add_role_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill",
        type=int,
        metavar="N",
        help="N engines prefill for the --decode M that answer, in place of --instances; 0: those prefill for each "
        "other",
    )
    group.add_argument("--decode", type=int, metavar="M", help="engines that answer, with --prefill")


def _add_timing_options(group: argparse._ArgumentGroup) -> None:
    timing = EngineTiming()
    group.add_argument(
        "--prefill-tokens-per-s", type=float, metavar="X", help=f"(default {timing.prefill_tokens_per_s:g})"
    )
    group.add_argument("--slow", default="", metavar="F,F...", help="slowness of the first engines (2: half as fast)")
    group.add_argument(
        "--leave",
        default="",
        metavar="E:X,E:X...",
        help="engine E (from 0) is lost after a share X of the run, with the requests in flight there",
    )
    group.add_argument(
        "--join",
        default="",
        metavar="E:X,E:X...",
        help="engine E comes, with an empty cache, after a share X of the run; it was not there before, unless it left",
    )


def _add_knowledge_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--index",
        choices=list(IndexMode),
        type=IndexMode,
        default=IndexMode.EVENTS,
        help="KV events, or only routed requests (default %(default)s)",
    )


def _add_router_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--routers",
        type=int,
        metavar="N",
        help="number of routers that decide, each request at a random one, and share their load (1 to 64; default 1)",
    )
    group.add_argument(
        "--delay",
        type=float,
        metavar="MS",
        help="delay of their messages in milliseconds (0 to 10000; default 10)",
    )
    group.add_argument("--no-exchange", action="store_true", help="they exchange no messages")
