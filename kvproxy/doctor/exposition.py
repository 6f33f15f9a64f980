"""What the doctor reads in an engine's `/metrics` besides `EngineMetrics`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LE = re.compile(rb'le="(\+Inf|[0-9.eE+]+)"')
#: A number beyond it is no count.
_MOST = 2.0**53
_GROWING = (b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total", b"vllm:time_to_first_token_seconds_sum")
_STARTED = b"process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Counters:
    """Figures that only grow and that no two engines share: what an engine did since its start."""

    values: tuple[float, ...]
    started_at: float | None = None  # of the process; the same in all figures of one engine

    @property
    def used(self) -> bool:
        """An engine that did nothing looks like any other."""
        return all(value > 0 for value in self.values)


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """How long this engine's prompts were."""

    count: int
    shorter: tuple[tuple[float, int], ...]  # (at most so many tokens, so many prompts), growing

    def share_below(self, tokens: int) -> float:
        """The share of prompts that are surely shorter (the histogram's buckets are coarse)."""
        below = max((count for bound, count in self.shorter if bound < tokens), default=0)
        return below / self.count if self.count else 0.0


def parse_counters(text: bytes) -> Counters | None:
    """None when the engine does not show them."""
    totals = [sum_samples(text, name) for name in _GROWING]
    if None in totals:
        return None
    return Counters(tuple(total for total in totals if total is not None), sum_samples(text, _STARTED))


def parse_prompt_lengths(text: bytes) -> PromptLengths:
    """From `vllm:request_prompt_tokens`, over all ranks and models."""
    buckets: dict[float, int] = {}
    for line in text.split(b"\n"):
        found = _LE.search(line) if line.startswith(b"vllm:request_prompt_tokens_bucket{") else None
        value = _value(line) if found else None
        if found is not None and value is not None and (bound := _number(found[1])) is not None:
            buckets[bound] = buckets.get(bound, 0) + int(value)
    return PromptLengths(max(buckets.values(), default=0), tuple(sorted(buckets.items())))


def sum_samples(text: bytes, name: bytes) -> float | None:
    """Over all ranks and models; None when there is no such sample."""
    values = [
        _value(line)
        for line in text.split(b"\n")
        if line.startswith(name) and line[len(name) : len(name) + 1] in (b"{", b" ")
    ]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _value(line: bytes) -> float | None:
    """The sample's value; a timestamp may follow it."""
    fields = (line.rpartition(b"}")[2] if b"}" in line else line.partition(b" ")[2]).split()
    value = _number(fields[0]) if fields else None
    return value if value is not None and 0.0 <= value <= _MOST else None


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
