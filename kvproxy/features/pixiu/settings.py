"""Dialect of Dubbo-go-Pixiu's configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.feature_settings import Dialect, FeatureSettings

if TYPE_CHECKING:
    from kvproxy.base.errors import Problem
    from kvproxy.base.settings.model import Model
    from kvproxy.operate.config.schema import Config


def recognizes(raw: Mapping[str, Any]) -> bool:
    """Return whether the file has Pixiu's shape: `static_resources`, or listeners with filter chains."""
    listeners = raw.get("listeners")
    return "static_resources" in raw or (
        isinstance(listeners, list) and any(isinstance(item, dict) and "filter_chains" in item for item in listeners)
    )


def decode(
    raw: Mapping[str, Any],
    *,
    extra_filters: Mapping[str, type[Model] | None],
    lenient: bool,
    known: Sequence[Problem],
) -> tuple[Config | None, list[Problem]]:
    """Translate the file; what of it has no counterpart is a problem, with `lenient` a warning."""
    from kvproxy.features.pixiu.load import decode_pixiu

    return decode_pixiu(raw, extra_filters=extra_filters, lenient=lenient, known=known)


SETTINGS = FeatureSettings(dialect=Dialect(recognizes, decode))
