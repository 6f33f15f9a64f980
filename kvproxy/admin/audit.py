"""One line for every change an operator makes: who, what, from which value to which."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from starlette.requests import Request

log = logging.getLogger("kvproxy.audit")


class Audit:
    """Writes to the logger `kvproxy.audit`, one JSON object a line, never a secret, whatever the log level is."""

    def __init__(self, *, wall_clock: Callable[[], datetime]) -> None:
        log.setLevel(logging.INFO)
        self._wall_clock = wall_clock

    def write(self, request: Request, action: str, **what: Any) -> None:
        """`request` changed something; `what` says what, with plain values."""
        line = {
            "time": self._wall_clock().isoformat(timespec="milliseconds"),
            "event": "admin",
            "action": action,
            "from": request.client.host if request.client else "unknown",
            **what,
        }
        log.info("%s", json.dumps(line, ensure_ascii=True))
