"""Parameters of a policy, changed while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, get_args

from annotated_types import Ge, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

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
    return {name: _range(field) for name, field in type(settings).model_fields.items()}


def _range(field: FieldInfo) -> str:
    least = [one.ge for one in field.metadata if isinstance(one, Ge)]
    most = [one.le for one in field.metadata if isinstance(one, Le)]
    numbers = [f"{low:g} to {high:g}" for low, high in zip(least, most, strict=True)]
    return " or ".join([*numbers, *("null" for kind in get_args(field.annotation) if kind is NoneType)])
