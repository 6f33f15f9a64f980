"""Policies whose parameters may be changed while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from kvproxy.config.decode import describe_problem
from kvproxy.config.model import Model
from kvproxy.config.paths import dotted_path
from kvproxy.errors import ConfigError


@runtime_checkable
class Tunable(Protocol):
    """A policy that reads its settings anew for every choice."""

    settings: Model


@runtime_checkable
class Informed(Protocol):
    """A policy that has learned something worth showing."""

    def learned(self, now: float) -> Mapping[str, object]:
        """Plain values by name, units in the names."""
        ...


def departures(policy: object, configured: Model | None) -> dict[str, object]:
    """Parameters that somebody changed while it ran: those that differ from what the configuration gives it."""
    if not isinstance(policy, Tunable) or configured is None:
        return {}
    first, present = configured.model_dump(), policy.settings.model_dump()
    return {name: value for name, value in present.items() if value != first[name]}


def follow(policy: object, before: Model | None, after: Model | None) -> None:
    """The configuration gives it other parameters than before: it takes those that changed there. What somebody
    changed while it ran stays otherwise."""
    if before is None or after is None:
        return
    if isinstance(policy, Tunable) and isinstance(policy.settings, type(after)):
        old, new = before.model_dump(), after.model_dump()
        changed = {name: value for name, value in new.items() if value != old[name]}
        policy.settings = policy.settings.model_copy(update=changed)


def tuned(settings: Model, changes: Mapping[str, Any]) -> Model:
    """`settings` with the changes; ConfigError with every problem (unknown name, wrong type, out of range), by name."""
    kind = type(settings)
    try:
        return kind.model_validate({**settings.model_dump(), **changes}, strict=True)
    except ValidationError as error:
        found = [describe_problem(kind, detail, dotted_path) for detail in error.errors(include_url=False)]
        allowed = ranges(settings)
        hints = [one.hint or f"allowed: {allowed[one.path]}" for one in found]
        raise ConfigError([replace(one, hint=hint) for one, hint in zip(found, hints, strict=True)]) from None


def ranges(settings: Model) -> dict[str, str]:
    """What each parameter may be, for people: `0 to 1`, `0 to 10 or null`."""
    return {name: _range(about) for name, about in type(settings).model_json_schema()["properties"].items()}


def _range(about: Mapping[str, Any]) -> str:
    choices = about.get("anyOf", [about])
    numbers = [f"{one['minimum']:g} to {one['maximum']:g}" for one in choices if "minimum" in one]
    return " or ".join([*numbers, *("null" for one in choices if one.get("type") == "null")])
