"""One line for every change an operator makes: from where, what, from which value to which."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request

from kvproxy.log_lines import log_fields

log = logging.getLogger("kvproxy.audit")


class Audit:
    """Writes to the logger `kvproxy.audit`, one line a change, never a secret, whatever the log level is."""

    def __init__(self) -> None:
        log.setLevel(logging.INFO)

    def write(self, request: Request, action: str, **what: Any) -> None:
        """`request` changed something; `what` says what, with plain values."""
        origin = request.client.host if request.client else "unknown"
        log_fields(log, "admin", {"action": action, "from": origin, **what})
