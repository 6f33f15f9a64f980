"""Decisions, as clients that ask for debugging read them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_MATCHED = re.compile(r"([^,]+):(\d+)/(\w+)")  # an endpoint's id may be a rank's (`a@0`) or an address


def decided(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the decision in an answer, by part."""
    return dict(part.split("=", 1) for part in headers["x-kvproxy-decision"].split("; "))


def predicted_at(headers: Mapping[str, str]) -> tuple[int, str]:
    """Return the tokens that were predicted to be reused where the request went, and by which source."""
    matched = _MATCHED.findall(decided(headers).get("matched", ""))
    found = {name: (int(tokens), source) for name, tokens, source in matched}
    return found.get(headers["x-kvproxy-endpoint"], (0, ""))
