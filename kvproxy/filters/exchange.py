"""Deprecated: earlier plug-ins import `Exchange` from here. It is in kvproxy.request.exchange."""

from __future__ import annotations

import warnings

from kvproxy.request.exchange import SCOPE_KEY, Exchange, Outcome

__all__ = ["SCOPE_KEY", "Exchange", "Outcome"]

warnings.warn("import Exchange from kvproxy.request.exchange", DeprecationWarning, stacklevel=2)
