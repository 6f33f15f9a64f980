"""What `kvproxy status` says of engines in a sentence each: a cache unlike its size, steps of reuse, adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: A learned cache size this far from what the engine says is shown.
_NOTABLE = 1.5
#: Endpoints, and adapters, named one by one.
_NAMED = 3


def describe_capacities(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of engines that keep much more or less than their cache size promises."""
    return [_learned(one) for one in endpoints if _unlike_told(one)]


def _unlike_told(one: Mapping[str, Any]) -> bool:
    cache = one.get("cache") or {}
    told, learned = cache.get("told_capacity_blocks", 0), cache.get("approximate_capacity_blocks", 0)
    return bool(told) and not 1 / _NOTABLE < learned / told < _NOTABLE


def _learned(one: Mapping[str, Any]) -> str:
    cache = one["cache"]
    ratio = cache["approximate_capacity_blocks"] / cache["told_capacity_blocks"]
    foreign = (cache.get("hit_ratio") or {}).get("foreign")
    others = f"; {foreign:.0%} of what it looks up is sent by others" if foreign else ""
    return f"{one['id']} keeps {ratio:.0%} of what its cache size promises (learned){others}"


def describe_steps(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of engines that reuse in long steps; mostly all of them are alike."""
    alike: dict[int, list[str]] = {}
    for one in endpoints:
        if step := (one.get("cache") or {}).get("reuse_step_tokens"):
            alike.setdefault(step, []).append(one["id"])
    return [
        f"{_some(names)} {'reuses' if len(names) == 1 else 'reuse'} in steps of {step:,} tokens; "
        f"prompts under {step:,} never hit"
        for step, names in alike.items()
    ]


def describe_adapters(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of engines that serve LoRA adapters: how many, and which are in their slots."""
    lines = []
    for one in endpoints:
        if adapters := one.get("adapters"):
            count, loaded, slots = len(adapters["served"]), adapters["loaded"], adapters["slots"]
            room = f" of {slots} slots" if slots else ""
            line = f"{one['id']} serves {count} adapter{'s' * (count != 1)}, {len(loaded)}{room} loaded"
            lines.append(f"{line}: {_some(loaded)}" if loaded else line)
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
