"""What a speed model has learned, as plain data that survives the process."""

from __future__ import annotations

import math

import msgspec


class FactorState(msgspec.Struct, array_like=True, frozen=True):
    """One endpoint's log factor against the pool."""

    log: float
    samples: int
    age_s: float  # of its last sample


class SpeedState(msgspec.Struct, array_like=True, frozen=True):
    """Coefficients are relative to `scale` (seconds for one unit of each feature)."""

    scale: tuple[float, float, float]
    theta: tuple[float, ...]
    gram: tuple[float, ...]  # row by row
    moment: tuple[float, ...]
    onboarding: tuple[float, float]  # seconds, tokens
    samples: int
    factors: dict[str, FactorState]
    scraped: int = 0  # of the samples


def checked(state: SpeedState, *, scale: tuple[float, float, float]) -> None:
    """Raises ValueError for a state no model of this scale could have been in."""
    if state.scale != scale:
        raise ValueError("learned from other priors")
    if (len(state.theta), len(state.gram), len(state.moment)) != (3, 9, 3):
        raise ValueError("of another shape")
    numbers = (*state.theta, *state.gram, *state.moment, *state.onboarding)
    logs = (value for one in state.factors.values() for value in (one.log, one.age_s))
    if not all(map(math.isfinite, (*numbers, *logs))):
        raise ValueError("not finite")
    if min(state.theta) <= 0 or min(*state.gram, *state.moment, state.onboarding[1]) < 0:
        raise ValueError("a negative time")
    if state.samples and min(state.gram[0], sum(state.moment)) <= 0:
        raise ValueError("samples without weight")
