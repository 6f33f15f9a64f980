"""The listener: health services, TLS, refused calls, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from hpack import Encoder

from kvproxy.app import Proxy
from kvproxy.features.picker import server as server_module
from kvproxy.features.picker.http2_frames import PREFACE
from kvproxy.features.picker.messages import EXT_PROC as SERVICE
from kvproxy.features.picker.messages import PROCESS
from kvproxy.features.picker.server import PickerServer
from kvproxy.operate.config.load import load_config
from tests.features.picker.support import A, Envoy, begin_stream, chat, destination, fields_of, running_picker
from tests.features.picker.test_http2 import DATA, END_HEADERS, HEADERS, RESET, SETTINGS, frame
from tests.support.certificates import make_certificate
from tests.support.until import until


async def health(channel: grpc.aio.Channel, service: str) -> str:
    """Return its health status."""
    answer = await HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=30)
    return HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_it_is_alive_and_ready_until_it_drains() -> None:
    """Each service of its own, and the one that Envoy asks for."""
    async with running_picker() as picker:
        for service in ("", "liveness", "readiness", SERVICE):
            assert await health(picker.channel, service) == "SERVING"
        picker.proxy.draining = True
        for service, expected in (("liveness", "SERVING"), ("readiness", "NOT_SERVING"), (SERVICE, "NOT_SERVING")):
            assert await health(picker.channel, service) == expected
        with pytest.raises(grpc.aio.AioRpcError, match="no such service"):
            await health(picker.channel, "else")


async def test_it_is_not_ready_without_an_endpoint() -> None:
    """Nothing could be picked."""
    async with running_picker(endpoints={"a": f"http://{A}"}) as picker:
        picker.proxy.clusters["default"].operator.drain_endpoint(picker.proxy.clusters["default"].endpoints[0].id)
        assert await health(picker.channel, "readiness") == "NOT_SERVING"


async def test_a_watch_says_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How it is at once, then each change; an unknown service may come yet. It counts as no request, and ends with the
    drain, which does not wait for it."""
    monkeypatch.setattr(server_module, "_LOOK_S", 0.01)
    async with running_picker(endpoints={"a": f"http://{A}"}, shutdown={"drain": "60s"}) as picker:
        watch = HealthStub(picker.channel).Watch
        ready = watch(HealthCheckRequest(service="readiness"), timeout=60)
        unknown = watch(HealthCheckRequest(service="else"), timeout=60)
        cluster = picker.proxy.clusters["default"]
        said = [(await unknown.read()).status]
        for draining in (False, True, False):
            cluster.operator.drain_endpoint(cluster.endpoints[0].id, draining=draining)
            said.append((await ready.read()).status)
        said_by_name = [HealthCheckResponse.ServingStatus.Name(status) for status in said]
        assert said_by_name == ["SERVICE_UNKNOWN", "SERVING", "NOT_SERVING", "SERVING"]
        assert picker.server.streams == 0
        unknown.cancel()
        await until(lambda: len(picker.server._watches) == 1)
        picker.proxy.draining = True
        assert HealthCheckResponse.ServingStatus.Name((await ready.read()).status) == "NOT_SERVING"
        assert await ready.code() is grpc.StatusCode.OK
        await until(lambda: not picker.server._server.streams)
        assert not picker.server._watches


async def test_an_unknown_method_is_unimplemented() -> None:
    """As gRPC says it."""
    async with running_picker() as picker:
        call = picker.channel.unary_unary("/else.Service/Method")(b"", timeout=30)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(("raw", "what"), [(b"\xff\xff", "INVALID_ARGUMENT"), (b"x" * 2_000_000, "RESOURCE_EXHAUSTED")])
async def test_messages_that_are_none_end_the_call(raw: bytes, what: str) -> None:
    """Not decodable, or longer than any body."""
    async with running_picker(limits={"body": "64KiB"}) as picker:
        call = picker.channel.stream_stream(PROCESS)(timeout=30)
        with contextlib.suppress(asyncio.InvalidStateError):  # it may have ended before all was written
            await call.write(raw)
        assert (await call.code()).name == what
        await until(lambda: picker.proxy.bodies.held_bytes == 0)


async def test_a_request_that_fails_ends_alone() -> None:
    """Others on the same connection go on, and what it reserved is given back."""
    async with running_picker() as picker:
        failing, other = picker.ask(), picker.ask()
        await failing.pick(chat())
        await other.pick(chat())
        assert sum(picker.in_flight().values()) == 2
        headers = {"headers": fields_of({":status": "9" * 5000})}  # more digits than Python reads as a number
        await failing.say(response_headers=headers)
        code, _ = await failing.status()
        assert code == "INTERNAL"
        assert sum(picker.in_flight().values()) == 1
        await other.answer()
        assert await other.finish() == ("OK", "")


async def test_compressed_messages_are_refused() -> None:
    """Envoy sends none, and a small one could become large."""
    async with running_picker() as picker:
        envoy = Envoy(begin_stream(picker.channel, compression=grpc.Compression.Gzip), headers={"x": "y" * 5000})
        await envoy.say_headers()
        assert (await envoy.status())[0] == "UNIMPLEMENTED"


async def test_half_a_message_of_a_stream_that_is_gone_is_not_held() -> None:
    """Envoy's bytes of it count among all bodies until then."""
    named = {":scheme": "http", ":authority": "x", "content-type": "application/grpc", "te": "trailers"}
    head: bytes = Encoder().encode({":method": "POST", ":path": PROCESS, **named})
    async with running_picker() as picker:
        _, writer = await asyncio.open_connection("127.0.0.1", picker.server.port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head))
        writer.write(frame(DATA, 0, 1, b"\0" + (1000).to_bytes(4, "big") + b"x" * 100))
        await until(lambda: picker.proxy.bodies.held_bytes == 105)
        writer.write(frame(RESET, 0, 1, b"\0\0\0\x08"))
        await until(lambda: picker.proxy.bodies.held_bytes == 0)
        writer.close()
        await writer.wait_closed()


async def test_it_serves_over_tls(tmp_path: Path) -> None:
    """With the certificate of its configuration."""
    made = make_certificate(tmp_path, "localhost")
    tls = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
    async with running_picker(picker={"tls": tls}) as picker:
        trusted = grpc.ssl_channel_credentials(made.certificate.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{picker.server.port}", trusted) as channel:
            assert await health(channel, "liveness") == "SERVING"
            assert destination(await Envoy(begin_stream(channel)).pick())


async def test_a_certificate_decides_on_connections(tmp_path: Path) -> None:
    """With `client_ca` other peers are not heard: each that is speaks for clients."""
    made = make_certificate(tmp_path, "localhost")
    certificate, key = made.certificate.read_bytes(), made.private_key.read_bytes()
    tls = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
    async with running_picker(picker={"tls": {**tls, "client_ca": str(made.certificate)}}) as picker:
        where = f"localhost:{picker.server.port}"
        known = grpc.ssl_channel_credentials(certificate, private_key=key, certificate_chain=certificate)
        async with grpc.aio.secure_channel(where, known) as channel:
            assert await health(channel, "liveness") == "SERVING"
        async with grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(certificate)) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await health(channel, "liveness")


async def test_handshakes_that_fail_take_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were, a client that speaks TLS is served; one that never ends does not hold the end up."""
    monkeypatch.setattr(server_module, "_MAX_CONNECTIONS", 2)
    made = make_certificate(tmp_path, "localhost")
    tls = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
    async with running_picker(picker={"tls": tls}) as picker:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", picker.server.port)
            writer.write(b"PRI * HTTP/2.0 in the clear\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        silent = await asyncio.open_connection("127.0.0.1", picker.server.port)
        trusted = grpc.ssl_channel_credentials(made.certificate.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{picker.server.port}", trusted) as channel:
            assert await health(channel, "liveness") == "SERVING"
    silent[1].close()


async def test_its_end_waits_for_what_envoy_carries() -> None:
    """And no longer than the drain time."""
    raw: dict[str, Any] = {"endpoints": {"a": f"http://{A}"}, "health": {"active": False}, "picker": {"port": 0},
                           "shutdown": {"drain": "60s"}}  # fmt: skip
    config = load_config(raw)
    assert config.picker is not None
    async with Proxy(config) as proxy:
        server = PickerServer(proxy, config.picker)
        await server.__aenter__()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            envoy = Envoy(begin_stream(channel))
            await envoy.pick()
            ending = asyncio.create_task(server.__aexit__())
            await envoy.answer(ended=True)
            assert not ending.done()
            assert await envoy.finish() == ("OK", "")
            async with asyncio.timeout(30):
                await ending
    assert proxy.clusters["default"].endpoints[0].load.in_flight == 0


async def test_a_reload_is_followed() -> None:
    """Endpoints, routes and the cache of the new configuration, on the same streams."""
    async with running_picker() as picker:
        await picker.ask().pick()
        raw: dict[str, Any] = {"endpoints": {"z": "http://127.0.0.1:12"}, "health": {"active": False}}
        await picker.proxy.reload(load_config(raw))
        assert destination(await picker.ask().pick()) == ["127.0.0.1:12"]
