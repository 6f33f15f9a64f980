"""Parameters of a prefill on a connection that was kept from an earlier request: a dead one is replaced, once."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from tests.features.disaggregation.support import Separated, prompt, running_fleet, text_of, words
from tests.support.proxy import running_proxy

_names = re.compile(rb'"remote_request_id":"([^"]*)"').findall


class Line:
    """The way to an engine. It notes the parameters of pulls, and can break before the next answer to one."""

    def __init__(self, url: str) -> None:
        self.pulls: list[bytes] = []
        self.breaks = False
        self._port = urlsplit(url).port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.create_task(self._carry_back(engine_reader, writer))
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                self.pulls += _names(piece)
                engine_writer.write(piece)
        engine_writer.close()
        await asyncio.gather(back, return_exceptions=True)

    async def _carry_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                if self.breaks and self.pulls:
                    self.breaks = False
                    break
                writer.write(piece)
        writer.close()


@contextlib.asynccontextmanager
async def lined() -> AsyncIterator[tuple[Separated, Line]]:
    """Yield a proxy whose decoder is at the end of such a line."""
    settings = {"connector": "nixl", "min_tokens": 16, "canary": 0}
    async with running_fleet("p", "d") as fleet:
        line = Line(fleet.urls["d"])
        async with await asyncio.start_server(line.carry, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            endpoints = [
                {"id": "p", "url": fleet.urls["p"], "role": "prefill"},
                {"id": "d", "url": url, "role": "decode"},
            ]
            async with running_proxy(endpoints, disaggregation=settings) as proxy:
                yield Separated(fleet, proxy), line


async def test_a_decoder_that_took_them_does_not_get_them_again() -> None:
    """The blocks may be another prompt's by then. The decoder computes the prompt."""
    async with lined() as (two, line):
        await two.proxy.client.post("/v1/completions", json=prompt("short"))
        line.breaks = True
        assert text_of(await two.ask(words("long"))) == await two.ask_engine("d", words("long"))
        assert len(line.pulls) == 1
        assert two.requests("refused") == 1
