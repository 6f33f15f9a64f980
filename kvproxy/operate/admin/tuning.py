"""Parameters of a policy, changed while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from kvproxy.base.errors import ConfigError
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import dotted_path
from kvproxy.operate.config.decode import describe_problem


def tuned(settings: Model, changes: Mapping[str, Any]) -> Model:
    """Return `settings` with the changes; ConfigError with every problem (unknown name, wrong type, out of range), by
    name."""
    kind = type(settings)
    try:
        return kind.model_validate({**settings.model_dump(), **changes}, strict=True)
    except ValidationError as error:
        found = [describe_problem(kind, detail, dotted_path) for detail in error.errors(include_url=False)]
        allowed = ranges(settings)
        hints = [one.hint or f"allowed: {allowed[one.path]}" for one in found]
        raise ConfigError([replace(one, hint=hint) for one, hint in zip(found, hints, strict=True)]) from None


def ranges(settings: Model) -> dict[str, str]:
    """Return what each parameter may be, for people: `0 to 1`, `0 to 10 or null`."""
    return {name: _range(about) for name, about in type(settings).model_json_schema()["properties"].items()}


def _range(about: Mapping[str, Any]) -> str:
    choices = about.get("anyOf", [about])
    numbers = [f"{one['minimum']:g} to {one['maximum']:g}" for one in choices if "minimum" in one]
    return " or ".join([*numbers, *("null" for one in choices if one.get("type") == "null")])
