"""What the demo prints: progress while it runs, a table at the end, lines to paste."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TextIO

from kvproxy.commands.demo_traffic import Mix, Reply

_BAR = 32
#: Of progress, where the output is no terminal; the last one is the end.
_LINES = 4


class Progress:
    """A bar that is redrawn on a terminal, and a few plain lines elsewhere."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._done = 0
        self._cached = 0
        self._prompt = 0
        self._live = out.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            print(file=self._out)

    def step(self, reply: Reply) -> None:
        """One more request was answered."""
        self._done += 1
        self._cached += reply.cached_tokens
        self._prompt += reply.prompt_tokens
        filled = _BAR * self._done // self._total
        share = self._cached / max(1, self._prompt)
        bar = "#" * filled + "." * (_BAR - filled)
        line = f"  [{bar}] {self._done}/{self._total}  {share:4.0%} of prompt tokens cached"
        if self._live:
            print(f"\r{line}", end="", flush=True, file=self._out)
        elif self._done * _LINES // self._total > (self._done - 1) * _LINES // self._total:
            print(line, flush=True, file=self._out)


def print_beginning(engines: int, mix: Mix, out: TextIO) -> None:
    """What is about to happen."""
    what = f"{mix.sessions} conversations of {mix.turns} turns"
    print(f"{what} through kvproxy, in front of {engines} simulated vLLM engines:", file=out)
    print("once routed by round_robin, once by kv_aware, which asks LMCache who holds a prompt.", file=out)


def print_table(results: Mapping[str, Sequence[Reply]], endpoints: Sequence[str], out: TextIO) -> None:
    """Per policy: who served how much, what was cached, and how long the first token took (streamed requests)."""
    header = f"{'policy':<14}{'requests per endpoint':<32}{'cached':>8}{'TTFT mean':>12}{'p50':>9}{'p99':>9}"
    print(f"\n{header}\n{'-' * len(header)}", file=out)
    for policy, replies in results.items():
        shares = " ".join(f"{name}:{sum(r.endpoint == name for r in replies)}" for name in endpoints)
        cached = sum(r.cached_tokens for r in replies) / max(1, sum(r.prompt_tokens for r in replies))
        times = sorted(r.ttft_s for r in replies if r.streamed)
        mean, p50, p99 = (
            _ms(value) for value in (_mean_ttft_s(replies), _quantile(times, 0.5), _quantile(times, 0.99))
        )
        print(f"{policy:<14}{shares:<32}{cached:>8.0%}{mean:>12}{p50:>9}{p99:>9}", file=out)
    first, *others = results
    for policy in others:
        ratio = _mean_ttft_s(results[policy]) / _mean_ttft_s(results[first])
        if math.isnan(ratio):
            continue
        print(f"\n{policy}: mean time to first token {ratio:.2f} x {first}'s, on the same conversations.", file=out)
    streamed = sum(r.streamed for replies in results.values() for r in replies)
    total = sum(len(replies) for replies in results.values())
    print(f"{streamed} of {total} requests were streamed; TTFT is theirs, as the client saw it.", file=out)


def print_try_it(url: str, admin_url: str, model: str, out: TextIO) -> None:
    """Lines that work as they are while the demo stays."""
    print(
        f"""
Live page: {admin_url}    (open it in a browser)

The proxy stays on {url} with a trickle of conversations running. Ctrl-C ends everything.

curl -N {url}/v1/chat/completions -H 'content-type: application/json' -H 'x-kvproxy-debug: 1' -i \\
  -d '{{"model": "{model}", "stream": true, "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}]}}'

pip install openai
python -c '
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
for part in client.chat.completions.create(model="{model}", stream=True, max_tokens=16,
                                           messages=[{{"role": "user", "content": "Hello"}}]):
    print(part.choices[0].delta.content or "", end="", flush=True)
'""",
        file=out,
    )


def _mean_ttft_s(replies: Sequence[Reply]) -> float:
    """NaN when none was streamed."""
    times = [reply.ttft_s for reply in replies if reply.streamed]
    return statistics.fmean(times) if times else math.nan


def _quantile(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else math.nan


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1000:.0f} ms"
