"""Which LoRA adapters an engine says are in use, in vLLM's `/metrics`. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

#: One line a combination ever seen; its value is the time of the last engine step that had it.
_LINE = re.compile(rb"^vllm:lora_requests_info\{([^}\n]{0,65536})\} ([0-9.eE+]{1,32})", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
#: Data-parallel ranks write in turn, each its own combination: lines this much older than the newest count as well.
_TOGETHER_S = 2.0
MAX_LINES, MAX_NAMES = 10_000, 1024


@dataclass(frozen=True, slots=True)
class LoraUse:
    """As of the engine's latest steps: after the last request of an adapter the engine may go on naming it."""

    slots: int  # adapters of which requests run at the same time; 0: not said
    running: frozenset[str]
    waiting: frozenset[str]


def parse_lora_use(text: bytes) -> LoraUse | None:
    """None: the engine serves no adapters, or ran none yet."""
    if b"vllm:lora_requests_info{" not in text:
        return None
    lines: list[tuple[float, bytes]] = []
    for found in _LINE.finditer(text):
        try:
            at = float(found[2])
        except ValueError:
            continue
        if math.isfinite(at):
            lines.append((at, found[1]))
        if len(lines) >= MAX_LINES:
            break
    if not lines:
        return None
    newest, latest = max(lines)
    slots = dict(_LABEL.findall(latest)).get(b"max_lora", b"")
    now = [dict(_LABEL.findall(labels)) for at, labels in lines if at >= newest - _TOGETHER_S]
    return LoraUse(
        int(slots) if slots.isdigit() and len(slots) < 10 else 0,
        _names([labels.get(b"running_lora_adapters", b"") for labels in now]),
        _names([labels.get(b"waiting_lora_adapters", b"") for labels in now]),
    )


def _names(lists: list[bytes]) -> frozenset[str]:
    names = {name.decode("utf-8", "replace") for each in lists for name in each.split(b",") if name}
    return frozenset(sorted(names)[:MAX_NAMES])
