"""The listener's life: starting, draining, cutting, TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.proxy.listener.parser import ListenerLimits
from kvproxy.proxy.listener.server import Server, accept_queued, bind_sockets, serve
from kvproxy.proxy.settings import ListenerTls
from tests.proxy.listener.client import Client, connect, echo, opened
from tests.support.certificates import make_certificate
from tests.support.until import until

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"


class Held:
    """An app whose response ends when the test says so."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.go = asyncio.Event()
        self.told: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running.set()
        await self.go.wait()
        await echo(scope, receive, send)


async def test_a_taken_port_is_an_os_error(caplog: pytest.LogCaptureFixture) -> None:
    """Not an exit of the whole process."""
    with caplog.at_level(logging.CRITICAL):
        async with Server(echo) as first:
            with pytest.raises(OSError, match="cannot listen on"):
                async with Server(echo, port=first.port):
                    pass


async def test_idle_connections_end_at_once() -> None:
    """Leaving does not wait for clients that have nothing to do."""
    async with asyncio.timeout(60):
        async with serve(echo, drain_s=60) as url:
            client = await opened(url)
            await client.send(GET)
            await client.response()
            fresh = await opened(url)
            await asyncio.sleep(0.01)
        assert await client.rest() == await fresh.rest() == b""
        client.writer.close()
        fresh.writer.close()


async def test_running_requests_finish_and_say_close() -> None:
    """No new client is let in; a response under way is completed, with `connection: close`."""
    held = Held()
    server = Server(held, drain_s=60)
    await server.__aenter__()
    async with connect(server.url) as client:
        await client.send(GET)
        await held.running.wait()
        url = server.url
        leaving = asyncio.create_task(server.__aexit__(None, None, None))
        await asyncio.sleep(0.02)
        assert not leaving.done()
        with pytest.raises(OSError):
            await opened(url)
        held.go.set()
        head, body = await client.response()
        assert b"\r\nconnection: close\r\n" in head
        assert body == b"GET /a? "
        async with asyncio.timeout(60):
            await leaving


@pytest.mark.parametrize("sharing", ["alone", "two sockets"])
async def test_connections_not_accepted_yet_are_served(sharing: str) -> None:
    """Connections in the kernel's queue when the end begins are let in, answered, and their close announced."""
    sockets = await bind_sockets("127.0.0.1", 0) if sharing == "two sockets" else None
    if sockets is not None:
        sockets += await bind_sockets("127.0.0.1", 0)
    server = Server(echo, sockets=sockets, drain_s=60, limits=ListenerLimits(closing_idle_s=60))
    await server.__aenter__()
    ports = [each.getsockname()[1] for one in server._server.servers for each in one.sockets]
    waiting = [
        socket.create_connection(("127.0.0.1", ports[-1]), timeout=5) for _ in range(50)
    ]  # the loop stands still
    for one in waiting[:25]:
        one.sendall(GET)
    async with asyncio.timeout(60):
        leaving = asyncio.create_task(server.__aexit__(None, None, None))
        await until(lambda: not server._server.servers[0].is_serving())
        clients = [Client(*await asyncio.open_connection(sock=one)) for one in waiting]
        for client in clients[25:]:
            await client.send(GET)  # after the end began
        for client in clients:
            head, body = await client.response()
            assert body == b"GET /a? "
            if b"\r\nconnection: close\r\n" not in head:  # answered before the end began
                await client.send(GET)
                assert b"\r\nconnection: close\r\n" in await client.head()
            client.writer.close()
        await leaving


@pytest.mark.parametrize("how", ["time", "hurry"])
async def test_a_queue_that_is_never_empty_is_left(how: str) -> None:
    """Clients that connect without end do not keep the listener open."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        async with asyncio.timeout(60):
            limit_s = 0.0 if how == "time" else 600
            await accept_queued([listening.fileno()], limit_s=limit_s, in_hurry=lambda: how == "hurry")


@pytest.mark.parametrize("how", ["time", "hurry"])
async def test_endless_responses_are_cut(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """After drain_s, or at once in a hurry; the app is told through receive()."""
    ended: list[str] = []
    running = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        running.set()
        ended.append((await receive())["type"])

    hurry = asyncio.Event()
    async with asyncio.timeout(60):
        async with Server(endless, drain_s=0.03 if how == "time" else 60, hurry=hurry) as server:
            client = await opened(server.url)
            await client.send(GET)
            await running.wait()
            if how == "hurry":
                hurry.set()
    assert ended == ["http.disconnect"]
    assert "cut 1 connections that outlived the drain" in caplog.text
    client.writer.close()


async def test_an_app_that_ignores_the_disconnect_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """Leaving is bounded whatever an app does."""
    held = Held()
    with caplog.at_level(logging.CRITICAL):
        async with asyncio.timeout(60):
            async with Server(held, drain_s=0.01, cut_grace_s=0.02) as server:
                client = await opened(server.url)
                await client.send(GET)
                await held.running.wait()
    client.writer.close()


async def test_https(tmp_path: Path) -> None:
    """With the certificate of the configuration."""
    files = make_certificate(tmp_path, "127.0.0.1")
    tls = ListenerTls(certificate=str(files.certificate), private_key=str(files.private_key))
    async with serve(echo, tls=tls) as url:
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=files.certificate)) as client:
            response = await client.post(url + "/a", content=b"hello")
            assert response.text == "POST /a? hello"


async def test_https_for_those_alone_that_show_a_certificate(tmp_path: Path) -> None:
    """Of one of the authorities that are named; another one, or none, gets no answer."""
    files = make_certificate(tmp_path, "127.0.0.1")
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other", "127.0.0.1")
    tls = ListenerTls(
        certificate=str(files.certificate), private_key=str(files.private_key), client_ca=str(files.certificate)
    )
    async with serve(echo, tls=tls) as url:
        for shown in (files, other, None):
            context = ssl.create_default_context(cafile=files.certificate)
            if shown is not None:
                context.load_cert_chain(shown.certificate, shown.private_key)
            async with httpx.AsyncClient(verify=context) as client:
                if shown is files:
                    assert (await client.post(url + "/a")).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await client.post(url + "/a")


async def test_ipv6_urls_have_brackets() -> None:
    """The URL can be used as it is."""
    server = Server(echo, host="::1")
    try:
        await server.__aenter__()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    assert server.url.startswith("http://[::1]:")
    await server.__aexit__(None, None, None)


async def leave(server: Server) -> asyncio.Task[None]:
    """Begin to leave the server; the task ends when it is closed."""
    task = asyncio.create_task(server.__aexit__())
    await until(lambda: server.stopping)
    return task


async def test_a_kept_connection_learns_of_the_end_with_its_next_answer() -> None:
    """A client that sends its next request just then gets the answer, and `connection: close` with it."""
    server = Server(echo, drain_s=60, limits=ListenerLimits(closing_idle_s=60))
    await server.__aenter__()
    async with connect(server.url) as client:
        await client.send(GET)
        assert b"connection: close" not in (await client.response())[0]
        leaving = await leave(server)
        await client.send(GET)
        assert b"connection: close" in (await client.response())[0]
        assert await client.rest() == b""
        await leaving


async def test_a_kept_connection_without_a_request_is_closed_after_the_idle_time() -> None:
    """The end of the process does not wait for clients that have nothing to ask."""
    server = Server(echo, drain_s=60, limits=ListenerLimits(closing_idle_s=0.05))
    await server.__aenter__()
    async with connect(server.url) as client:
        await client.send(GET)
        await client.response()
        leaving = await leave(server)
        assert await client.rest() == b""
        await leaving


async def test_a_connection_whose_stream_began_before_the_end_takes_one_more_request() -> None:
    """Its head could not announce the close, so the client may send on it right after the last byte."""
    go_on = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"b"})

    server = Server(stream, drain_s=60, limits=ListenerLimits(closing_idle_s=60))
    await server.__aenter__()
    async with connect(server.url) as client:
        await client.send(GET)
        assert b"connection: close" not in await client.head()
        leaving = await leave(server)
        go_on.set()
        assert await client.reader.readexactly(2) == b"ab"
        await client.send(GET)
        assert b"connection: close" in (await client.response())[0]
        await leaving
