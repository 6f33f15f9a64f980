"""The options of `kvproxy plan`; apart from the command, so that parsing a command line loads little."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvproxy.lab.planner.memory import BLOCK_TOKENS, SEQUENCE_TOKENS, UTILIZATION
from kvproxy.lab.replay.settings import ENGINES
from kvproxy.operate.commands.options import Option, add_options

_ENGINE = (
    Option("--model", "NAME|FILE", "list", "a known model, or a config.json (default: list them)"),
    Option("--gpu", "SIZE", "80GiB", "memory of one GPU (default %(default)s)"),
    Option("--tp", "N", 1, "GPUs of an engine in tensor parallel (default %(default)s)"),
    Option("--dtype", "T", "auto", "of the KV cache, as vLLM's --kv-cache-dtype: auto (the model's), bf16, fp8 ..."),
    Option("--weights", "SIZE", str, "of the weights (else from the parameters and their precision)"),
    Option("--parameters", "N", str, "of the model, such as 8B, where they are not known"),
    Option("--weights-dtype", "T", "", "precision of the weights (default: as published)"),
    Option("--utilization", "X", UTILIZATION,
           "used share of a GPU's memory, as vLLM's --gpu-memory-utilization (default %(default)s)"),
    Option("--overhead", "SIZE", "2GiB",
           "on each GPU for activations and CUDA graphs (default %(default)s; vLLM logs it)"),
    Option("--host", "SIZE", "0", "host memory of an engine for KV"),
    Option("--disk", "SIZE", "0", "disk of an engine for KV"),
    Option("--block-size", "N", BLOCK_TOKENS, "tokens a block (default %(default)s)"),
    Option("--context", "N", int, "tokens of a usual request, which counts where layers keep a window or a state "
           f"(default {SEQUENCE_TOKENS}, or the trace's)"),
    Option("--json", "FILE", Path, "write the figures"),
)  # fmt: skip
_TRAFFIC = (
    Option("--trace", "FILE", Path, "play it on several sizes of cache (see `kvproxy replay`)"),
    Option("--requests", "N", 0, "only its first N requests"),
    Option("--sizes", "X,X...", "0.25,0.5,1,2,4",
           "of an engine's cache, as shares of the planned one (default %(default)s)"),
    Option("--want-hit", "X", float, "the cheapest setting with this hit rate"),
    Option("--want-ttft", "S", float, "the cheapest setting with this mean TTFT"),
    Option("--instances", "N", 4, "engines (default %(default)s)"),
    Option("--load", "X", 0.7,
           "share of their throughput with a pooled cache of the planned size (default %(default)s)"),
    Option("--policy", "P", "kv_aware", "as in `kvproxy replay` (default %(default)s)"),
    Option("--host-gbps", "X", 20.0, "read from host memory (default %(default)g)"),
    Option("--disk-gbps", "X", 5.0, "read from disk (default %(default)g)"),
    Option("--prefill-tokens-per-s", "X", float, "of an engine; TTFT is no better than this figure"),
    Option("--plot", "FILE", Path, "write an HTML page with plots (FILE.html)"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvproxy plan`."""
    add_options(parser, _ENGINE)
    traffic = parser.add_argument_group("on a trace")
    add_options(traffic, _TRAFFIC)
    speeds = "speeds and limits (default %(default)s)"
    traffic.add_argument("--engine", choices=list(ENGINES), default="h100", help=speeds)
