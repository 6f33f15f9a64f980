"""Whether the installed uvicorn is the one whose classes our protocol and cycle are built on."""

from __future__ import annotations

import inspect

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: What to do about another one; the range is that of pyproject.toml (a test compares them).
RANGE = "uvicorn>=0.35,<0.55"
INSTALL = f"pip install '{RANGE}'"

_CYCLE_ARGUMENTS = {
    "scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers", "message_event",
    "expect_100_continue", "keep_alive", "on_response",
}  # fmt: skip
_CYCLE_ATTRIBUTES = {
    "disconnected", "keep_alive", "waiting_for_100_continue", "more_body", "response_started", "response_complete",
    "chunked_encoding", "expected_content_length",
}  # fmt: skip
_PROTOCOL_ATTRIBUTES = {
    "parser", "root_path", "server_state", "connections", "transport", "flow", "pipeline", "scope", "headers",
    "expect_100_continue", "cycle", "loop", "app", "config", "app_state", "server", "client", "scheme", "tasks",
}  # fmt: skip
_PROTOCOL_METHODS = (
    "on_message_begin", "on_message_complete", "on_response_complete", "on_url",
    "send_400_response",
)  # fmt: skip


def difference(cycle: type = RequestResponseCycle, protocol: type = HttpToolsProtocol) -> str:
    """What of uvicorn is not as protocol.py and cycle.py need it; "" when nothing is."""
    arguments = set(inspect.signature(cycle).parameters)
    if arguments != _CYCLE_ARGUMENTS:
        return f"RequestResponseCycle takes {sorted(arguments ^ _CYCLE_ARGUMENTS)} differently"
    for kind, needed in ((cycle, _CYCLE_ATTRIBUTES), (protocol, _PROTOCOL_ATTRIBUTES)):
        missing = needed - set(vars(kind)["__init__"].__code__.co_names)
        if missing:
            return f"{kind.__name__} has no {sorted(missing)}"
    absent = [name for name in _PROTOCOL_METHODS if not hasattr(protocol, name)]
    return f"{protocol.__name__} has no {absent}" if absent else ""
