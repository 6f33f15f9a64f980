"""The end of accepting: every connection that a client has made is let in before the listening socket is closed.

The kernel resets connections that wait in the queue of a socket that is closed, and an event loop drops those that it
has accepted in its last two turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import select
import socket
import struct
from collections.abc import Callable, Sequence

#: Turns of the loop from accepting a connection until its transport is made, plus one.
_QUIET_TURNS = 4
_SO_ATTACH_FILTER = 26  # Linux
#: A classic BPF program on the TCP header: drop a segment with SYN and without ACK, and take all others.
_PROGRAM = (
    (0x30, 0, 0, 13),  # A = flags
    (0x54, 0, 0, 0x12),  # A &= SYN | ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # take
)


def refuse_silently(listening: socket.socket) -> None:
    """Let the kernel drop new connections, whose clients try again after a second, and keep those it has. No effect
    where there are no such filters."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in _PROGRAM))
    with contextlib.suppress(OSError):
        pointer = struct.pack("@HP", len(_PROGRAM), ctypes.addressof(program))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


async def accept_queued(listening: Sequence[int], *, limit_s: float, in_hurry: Callable[[], bool]) -> None:
    """Let the loop accept what waits at these descriptors, for `limit_s` at most: more may always come."""
    queues = select.poll()
    for number in listening:
        queues.register(number, select.POLLIN)
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    quiet_turns = 0
    while quiet_turns < _QUIET_TURNS and loop.time() < end and not in_hurry():
        quiet_turns = 0 if queues.poll(0) else quiet_turns + 1
        await asyncio.sleep(0)
