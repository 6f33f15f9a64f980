"""LiteLLM's Router over four simulated engines: `kvproxy.litellm` beside LiteLLM's own strategies.

    pip install 'kvproxy[litellm]'
    python -m benchmarks.litellm_routing [--rounds N] > benchmarks/reports/litellm.md

Agents and chats (benchmarks/small_traces.py) are played in virtual time, LiteLLM's and kvproxy's code as they are, over
HTTP; each run has a process and engines of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import virtual
from benchmarks.markdown import table
from benchmarks.small_traces import MODEL, TRACES, Ask, play, serve_engines, summarize

OURS = "kvproxy.litellm"
STRATEGIES = ("simple-shuffle", "least-busy", "latency-based-routing", OURS)


async def play_strategy(name: str, strategy: str) -> dict[str, float]:
    """Play the trace once, in this process."""
    import litellm

    if strategy == OURS:
        from kvproxy.litellm import KVCacheRouting

        litellm.callbacks = [KVCacheRouting()]
    small = TRACES[name]
    async with serve_engines(small) as urls:
        deployments = [
            {
                "model_name": MODEL,
                "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
                "model_info": {"id": engine},
            }
            for engine, url in urls.items()
        ]
        chosen = "simple-shuffle" if strategy == OURS else strategy
        router = litellm.Router(model_list=deployments, routing_strategy=chosen, num_retries=0)

        async def send(ask: Ask) -> None:
            stream = await router.acompletion(
                model=MODEL,
                messages=[{"role": "user", "content": ask.prompt}],
                max_tokens=ask.output_tokens,
                stream=True,
                stream_options={"include_usage": True},
                metadata={"session_id": ask.session},
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    ask.first_token()
                if usage := getattr(chunk, "usage", None):
                    ask.read_usage(usage.model_dump())

        return summarize(await play(small.read(), send))


def run(trace: str, strategy: str, seed: int) -> dict[str, float]:
    """Play a strategy in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.virtual", "benchmarks.litellm_routing", "--play"]
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "PYTHONHASHSEED": str(seed),
    }
    answer = subprocess.run([*command, trace, strategy, str(seed)], env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def as_markdown(found: Mapping[str, Mapping[str, list[dict[str, float]]]], *, command: str) -> str:
    """Return the report: medians over the rounds, and ratios within a round."""
    lines = [
        "# Routing in LiteLLM's Router",
        "",
        f"`{command}`. Four simulated engines over HTTP, in virtual time (CPU is not counted). Ratios are medians of "
        "those within one round.",
    ]
    for trace, strategies in found.items():
        ours = strategies[OURS]
        rows = [
            [
                strategy,
                f"{_median(runs, 'ttft_s'):.3f}",
                f"{_median(runs, 'ttft_p90_s'):.3f}",
                f"{statistics.median(a['ttft_s'] / b['ttft_s'] for a, b in zip(ours, runs, strict=True)):.2f}",
                f"{_median(runs, 'hits'):.3f}",
                f"{sum(each['failed'] for each in runs):.0f} of {sum(each['requests'] for each in runs):.0f}",
            ]
            for strategy, runs in strategies.items()
        ]
        heads = ["strategy", "mean TTFT, s", "p90, s", "ours of its mean", "prompt tokens cached", "failed"]
        lines += ["", f"## {trace.capitalize()}", *table(heads, rows)]
    return "\n".join([*lines, ""])


def _median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in runs)


def main() -> None:
    """Print the report, or with --play the figures of one run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--play", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        trace, strategy, seed = args.play
        random.seed(int(seed))
        print(json.dumps(virtual.run(play_strategy(trace, strategy))))
        return
    found: dict[str, dict[str, list[Any]]] = {trace: {each: [] for each in STRATEGIES} for trace in TRACES}
    for seed in range(1, args.rounds + 1):
        for trace in TRACES:
            for strategy in STRATEGIES:
                found[trace][strategy].append(run(trace, strategy, seed))
                print(trace, strategy, found[trace][strategy][-1], file=sys.stderr)
    command = f"python -m benchmarks.litellm_routing --rounds {args.rounds}"
    sys.stdout.write(as_markdown(found, command=command))


if __name__ == "__main__":
    main()
