"""Ports for programs that are started a moment later."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Return ports without a listener now, all different, below those of outgoing connections: what is started later
    finds them free."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 30_000), 10_000):
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]
