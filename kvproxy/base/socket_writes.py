"""Several buffers written to a transport at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


def write_pieces(transport: asyncio.Transport, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces in order, with one system call if the socket takes all of them.

    asyncio's own transports get one joined buffer: before Python 3.12.9 and 3.13.2 their `writelines` never pauses the
    protocol (CVE-2024-12254), and from 3.12 on an empty piece makes it call `sendmsg` without end. uvloop's transports
    write the pieces without a copy.
    """
    is_asyncios = isinstance(transport, asyncio.Transport)  # uvloop's classes only look like it
    if is_asyncios:
        transport.write(b"".join(pieces))
    else:
        transport.writelines([piece for piece in pieces if piece])
