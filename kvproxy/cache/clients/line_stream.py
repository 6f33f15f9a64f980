"""An answer without end: JSON objects one a line, as APIs with a watch send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import httpx

from kvproxy.base.errors import BadResponse, ClientTimeout, ClientUnavailable
from kvproxy.cache.clients.api import MAX_ERROR_BYTES, Api, failure


class StreamApi(Api):
    """An HTTP API that also answers with streams."""

    async def stream_lines(
        self, method: str, path: str, *, body: bytes | None = None, timeout_s: float, idle_s: float, max_line_bytes: int
    ) -> AsyncGenerator[Sequence[bytes]]:
        """Yield whole lines as they arrive, several at a time; an empty batch first, when the stream has begun.

        Ends when the service ends it, is cut off, or is silent for `idle_s`: half a line at the end is left out. Raises
        ClientError before it began, as `call` does, and BadResponse for a line over the bound."""
        headers = self._headers if body is None else {**self._headers, "content-type": "application/json"}
        timeout = httpx.Timeout(timeout_s, read=idle_s)
        request = self._http.build_request(method, self._base + path, content=body, headers=headers, timeout=timeout)
        response = await self._begin(request, path, timeout_s)
        try:
            yield ()
            async for lines in _lines(response, max_line_bytes, f"{self._service} {path.partition('?')[0]}"):
                yield lines
        except httpx.TransportError:
            return
        finally:
            await response.aclose()

    async def _begin(self, request: httpx.Request, path: str, timeout_s: float) -> httpx.Response:
        where = f"{self._service} {path.partition('?')[0]}"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.send(request, stream=True)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ClientTimeout(f"{where}: no answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise ClientUnavailable(f"{where}: {failure(error)}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BadResponse(f"{where}: {type(error).__name__}") from error
        if response.is_success:
            return response
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(response, path.partition("?")[0], MAX_ERROR_BYTES)  # raises
        except (TimeoutError, httpx.HTTPError) as error:
            raise ClientUnavailable(f"{where}: {response.status_code}") from error
        finally:
            await response.aclose()
        raise BadResponse(f"{where}: {response.status_code}")


async def _lines(response: httpx.Response, max_line_bytes: int, where: str) -> AsyncGenerator[Sequence[bytes]]:
    begun = bytearray()
    async for chunk in response.aiter_bytes():
        whole, newline, tail = chunk.rpartition(b"\n")
        if len(begun) + len(tail if newline == b"" else whole) > max_line_bytes + len(chunk):
            raise BadResponse(f"{where}: a line over {max_line_bytes} bytes")
        if newline:
            yield [line for line in (bytes(begun) + whole).split(b"\n") if line]
            begun = bytearray(tail)
        else:
            begun += tail
