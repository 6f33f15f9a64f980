"""The options of `kvproxy plan`; apart from the command, so that parsing a command line loads little."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvproxy.lab.planner.memory import BLOCK_TOKENS, SEQUENCE_TOKENS, UTILIZATION
from kvproxy.lab.replay.settings import ENGINES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvproxy plan`."""
    option = parser.add_argument
    option("--model", default="list", metavar="NAME|FILE", help="a known model, or a config.json (default: list them)")
    option("--gpu", default="80GiB", metavar="SIZE", help="memory of one GPU (default %(default)s)")
    option("--tp", type=int, default=1, metavar="N", help="GPUs of an engine in tensor parallel (default %(default)s)")
    option(
        "--dtype",
        default="auto",
        metavar="T",
        help="of the KV cache, as vLLM's --kv-cache-dtype: auto (the model's), bf16, fp8 ...",
    )
    option("--weights", metavar="SIZE", help="of the weights (else from the parameters and their precision)")
    option("--parameters", metavar="N", help="of the model, such as 8B, where they are not known")
    option("--weights-dtype", default="", metavar="T", help="precision of the weights (default: as published)")
    option(
        "--utilization",
        type=float,
        default=UTILIZATION,
        metavar="X",
        help="used share of a GPU's memory, as vLLM's --gpu-memory-utilization (default %(default)s)",
    )
    option(
        "--overhead",
        default="2GiB",
        metavar="SIZE",
        help="on each GPU for activations and CUDA graphs (default %(default)s; vLLM logs it)",
    )
    option("--host", default="0", metavar="SIZE", help="host memory of an engine for KV")
    option("--disk", default="0", metavar="SIZE", help="disk of an engine for KV")
    option("--block-size", type=int, default=BLOCK_TOKENS, metavar="N", help="tokens a block (default %(default)s)")
    option(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a usual request, which counts where layers keep a "
        f"window or a state (default {SEQUENCE_TOKENS}, or the trace's)",
    )
    option("--json", type=Path, metavar="FILE", help="write the figures")
    _add_traffic_options(parser.add_argument_group("on a trace"))


def _add_traffic_options(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--trace", type=Path, metavar="FILE", help="play it on several sizes of cache (see `kvproxy replay`)")
    option("--requests", type=int, default=0, metavar="N", help="only its first N requests")
    option(
        "--sizes",
        default="0.25,0.5,1,2,4",
        metavar="X,X...",
        help="of an engine's cache, as shares of the planned one (default %(default)s)",
    )
    option("--want-hit", type=float, metavar="X", help="the cheapest setting with this hit rate")
    option("--want-ttft", type=float, metavar="S", help="the cheapest setting with this mean TTFT")
    option("--instances", type=int, default=4, metavar="N", help="engines (default %(default)s)")
    option(
        "--load",
        type=float,
        default=0.7,
        metavar="X",
        help="share of their throughput with a pooled cache of the planned size (default %(default)s)",
    )
    option("--policy", default="kv_aware", metavar="P", help="as in `kvproxy replay` (default %(default)s)")
    option("--engine", choices=list(ENGINES), default="h100", help="speeds and limits (default %(default)s)")
    option("--host-gbps", type=float, default=20.0, metavar="X", help="read from host memory (default %(default)g)")
    option("--disk-gbps", type=float, default=5.0, metavar="X", help="read from disk (default %(default)g)")
    option("--prefill-tokens-per-s", type=float, metavar="X", help="of an engine; TTFT is no better than this figure")
    option("--plot", type=Path, metavar="FILE", help="write an HTML page with plots (FILE.html)")
