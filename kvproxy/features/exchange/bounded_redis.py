"""Replies of a Redis server, bounded in bytes: the client library keeps a message in memory before it returns it."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError


class BoundedReader:
    """A StreamReader from which at most `left` more bytes may be read."""

    def __init__(self, stream: Any, left: int) -> None:
        self._stream = stream
        self.left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, most: int) -> bytes:
        """As of StreamReader. Raises RedisConnectionError."""
        data: bytes = await self._stream.read(most)
        self._take(len(data))
        return data

    async def readexactly(self, count: int) -> bytes:
        """As of StreamReader. Raises RedisConnectionError."""
        self._take(count)
        data: bytes = await self._stream.readexactly(count)
        return data

    def _take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise RedisConnectionError("a reply is longer than any of ours")


def make_bounded_parser(most_bytes: int) -> type[Any]:
    """Return the class of a parser that ends the connection at a longer reply."""

    class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]
        _stream: Any

        def on_connect(self, connection: Any) -> None:
            super().on_connect(connection)
            self._stream = BoundedReader(self._stream, most_bytes)

        async def read_response(self, *args: Any, **options: Any) -> Any:
            self._stream.left = most_bytes
            return await super().read_response(*args, **options)

    return BoundedParser
