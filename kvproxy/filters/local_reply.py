"""Deprecated: earlier plug-ins import `local_reply` from here. It is in kvproxy.request.error_reply."""

from __future__ import annotations

import warnings

from kvproxy.request.error_reply import error_body, local_reply, speaks_anthropic

__all__ = ["error_body", "local_reply", "speaks_anthropic"]

warnings.warn("import local_reply from kvproxy.request.error_reply", DeprecationWarning, stacklevel=2)
