"""The one scale of urgency: in which order requests go that wait, at the router and in an engine. Pure.

Least goes first. Own work counts in seconds, so that short prompts overtake long ones (that shortens the mean wait
most), and each second of waiting outweighs `ageing` seconds of it, so that no prompt waits for ever: only those go past
a request that are shorter by more than `ageing` times what they came later. As a number that is fixed at arrival it
needs no keeping up, and every router, restart and engine that is given it agrees on the order.
"""

from __future__ import annotations

#: Seconds of own work that one second of waiting outweighs.
AGEING = 0.3

#: 2026-01-01 00:00 UTC: wall-clock seconds since then keep the numbers positive (what carries none counts as 0 in an
#: engine and goes first) and exact.
EPOCH_S = 1_767_225_600.0


def urgency_s(
    own_s: float, now: float, *, slowness: float = 1.0, ageing: float = AGEING, class_s: float = 0.0
) -> float:
    """Where a request that came at `now` stands: `own_s` pooled seconds of prefill on an endpoint `slowness` times as
    slow as the pool, and `class_s` seconds that its class or tenant puts it ahead by (negative: behind)."""
    return slowness * own_s + ageing * now - class_s


def engine_priority(urgency: float) -> int:
    """The same in milliseconds, as vLLM takes it in `priority`: an integer, the lower first."""
    return round(1000.0 * urgency)
