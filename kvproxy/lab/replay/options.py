"""The options of `kvproxy replay`; apart from the command, so that parsing a command line loads little."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from kvproxy.lab.replay.results import GoodputLimits
from kvproxy.lab.replay.settings import ENGINES, IndexMode, ReplayFleet, TierPlan
from kvproxy.lab.replay.trace import Half
from kvproxy.lab.simulator.retention import Eviction
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.operate.commands.options import Option, add_options

DEFAULT_LOAD = 0.7
_PUBLISHED = "dynamo,lmetric,least_ttft," if find_spec("kvproxy.features.published") else ""
DEFAULT_POLICIES = f"{_PUBLISHED}kv_aware"
_FLEET = ReplayFleet()
_GOODPUT = GoodputLimits()
_MORE_TIERS = ", ".join(name for name in TierPlan.NAMES if name not in ("device", "host", "gbps"))

_RUN = (
    Option("--receipts", "FILE", Path, "instead of a trace: decide recorded decisions again"),
    Option("--scenario", "S,S...", "", "a workload with its load, or a disturbance of a fleet (then also on a TRACE); "
           "`list` prints them all"),
    Option("--policy", "P,P...", DEFAULT_POLICIES, "policies, side by side; kv_aware has the router queue, +no_queue "
           "takes it away, +no_admission the rule by which sessions wait for room; behind least_ttft +queue adds it; "
           "behind both, +priority has engines admit in the router's order; behind kv_aware, +move copies KV between "
           "engines on demand (--link); +apart=RULE computes prompts apart (--prefill) by always, never, dynamo or "
           "llm_d in place of the expected first token; behind any, +tier_blind hides tiers below engine memory; "
           "places=N admits N sessions on each engine, to their end; module:Rule is a rule of your own that admits "
           "sessions (default %(default)s)"),
    Option("--baseline", "P", "", "policy of the last column (default: the first)"),
    Option("--instances", "N", 8, "engines (default %(default)s)"),
    Option("--load", "X", float,
           f"share of their throughput with one pooled cache (default {DEFAULT_LOAD}, or the scenario's)"),
    Option("--once", None, False, "play the trace once, at its own pace, and report on sessions: how many end an hour, "
           "how long they take and wait"),
    Option("--sessions-at-once", "N", 0, "with --once: at most N sessions are under way, further ones begin as others "
           "end (default: no bound)"),
    Option("--seeds", "K", 1, "runs to average; in each, sessions start up to half a second later than in the trace "
           "(default %(default)s)"),
    Option("--streamed", "X", 1.0, "share of the answers that are streamed; the router sees no first token of the "
           "others (default %(default)s)"),
    Option("--requests", "N", 0, "only the first N requests of the trace; in virtual time a short one is repeated, "
           "each time with prefixes of its own, until the figures are steady"),
    Option("--half", None, Half.BOTH, "only this half of the conversations: constants are tuned on one half, figures "
           "reported on the other"),
    Option("--open-loop", None, False, "turns come at fixed times, independent of earlier answers"),
    Option("--goodput-ttft", "S", _GOODPUT.ttft_s,
           "an answer is good with its first token before this (default %(default)s)"),
    Option("--goodput-tpot", "S", _GOODPUT.tpot_s,
           "and less than this per token after it, on average (default %(default)s)"),
    Option("--all-figures", None, False,
           "a second table: TTFT p90 and the longest, e2e p99, TPOT, session completion time, fairness"),
    Option("--json", "FILE", Path, "write the figures"),
    Option("--plot", "FILE", Path, "write an HTML page with plots (FILE.html)"),
)  # fmt: skip
_ENGINES = (
    Option("--max-num-batched-tokens", "N", int, f"tokens a step (default {_FLEET.max_batched_tokens})"),
    Option("--max-num-seqs", "N", int, f"sequences at once (default {_FLEET.max_sequences})"),
    Option("--long-prefill-token-threshold", "N", int,
           "most tokens a step of one prompt among others (default: no bound)"),
    Option("--block-size", "N", int, "of the engines' caches, a part of the trace's blocks; small ones take "
           "milliseconds a request (default: as in the trace)"),
    Option("--prefill-floor", "S", float, "least time of a step without decodes (default 0)"),
    Option("--capacity-tokens", "N", int, f"KV cache of each (default {_FLEET.capacity_tokens})"),
    Option("--tiers", "NAME=X,...", "", "tiers below engine memory: device=0.25,host=4,gbps=20 leaves a quarter of it, "
           "with host memory of four times that, read at 20 GB/s (a token's KV is 128 KiB); docs/replay.md describes "
           f"{_MORE_TIERS}"),
    Option("--eviction", None, Eviction.LRU,
           "eviction order of engines and tiers; optimum uses the future (default %(default)s)"),
    Option("--link", "GBPS", 12.5, "link for copies of +move, each way of each engine (default %(default)s; a token's "
           "KV is 128 KiB; below 1 nothing is copied)"),
    Option("--prefill", "N", int, "N engines prefill for the --decode M that answer, in place of --instances; 0: those "
           "prefill for each other"),
    Option("--decode", "M", int, "engines that answer, with --prefill"),
    Option("--prefill-tokens-per-s", "X", float, f"(default {EngineTiming().prefill_tokens_per_s:g})"),
    Option("--slow", "F,F...", "", "slowness of the first engines (2: half as fast)"),
    Option("--leave", "E:X,E:X...", "",
           "engine E (from 0) is lost after a share X of the run, with the requests in flight there"),
    Option("--join", "E:X,E:X...", "", "engine E comes, with an empty cache, after a share X of the run; it was not "
           "there before, unless it left"),
)  # fmt: skip
_KNOWLEDGE = (
    Option("--index", None, IndexMode.EVENTS, "KV events, or only routed requests (default %(default)s)"),
)  # fmt: skip
_ROUTERS = (
    Option("--routers", "N", int,
           "number of routers that decide, each request at a random one, and share their load (1 to 64; default 1)"),
    Option("--delay", "MS", float, "delay of their messages in milliseconds (0 to 10000; default 10)"),
    Option("--no-exchange", None, False, "they exchange no messages"),
)  # fmt: skip
_LIVE = (
    Option("--url", "URL", str, "send the trace's shape to this proxy or engine"),
    Option("--model", None, "", "model to request (default: the first the server lists)"),
    Option("--api-key", None, "", "sent as a bearer token"),
    Option("--pace", "X", 1.0, "multiplies the trace's times (default %(default)s)"),
    Option("--concurrency", None, 256, "requests under way at once (default %(default)s)"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvproxy replay`."""
    trace = "a trace (see benchmarks/traces/), gzipped or not"
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help=trace)
    add_options(parser, _RUN)
    engines = parser.add_argument_group("engines")
    engines.add_argument(
        "--engine",
        choices=list(ENGINES),
        default="default",
        help="defaults of the other options: h100 has the defaults of a vLLM server there, 8192 tokens a step and "
        "1024 sequences, steps of 8 ms at least, and reuses answers",
    )
    reuse = "the next turn finds the blocks of an answer, as with vLLM"
    engines.add_argument("--reuse-outputs", action=argparse.BooleanOptionalAction, default=None, help=reuse)
    add_options(engines, _ENGINES)
    add_options(parser.add_argument_group("the router's view of the caches"), _KNOWLEDGE)
    add_options(parser.add_argument_group("several routers", "workers or replicas"), _ROUTERS)
    add_options(parser.add_argument_group("live", "real requests instead of virtual time"), _LIVE)
