"""Endpoints from an etcd that answers nonsense; a real one is asked in tests/services."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.entries import LeftOut
from kvproxy.features.etcd.source import endpoint_of
from tests.cluster.followed import Follow
from tests.support.loopback import serve
from tests.support.until import until


def text(raw: str) -> str:
    return base64.b64encode(raw.encode()).decode()


TOKEN = (b"authorization", b"the-token.7")


class FakeEtcd:
    """ASGI app: one key, and a watch that brings the lines it is told, each once; then it is silent."""

    def __init__(self) -> None:
        self.lists = 0
        self.range: dict[str, object] = {
            "header": {"revision": "7"},
            "kvs": [{"key": text("/e/a"), "value": text("http://127.0.0.1:1")}],
        }
        self.watched: list[dict[str, str]] = []
        self.password = ""  # of its only user, where it wants one
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads((await receive())["body"])
        if self.password:
            asks = scope["path"] == "/v3/auth/authenticate"
            good = body == {"name": "kvproxy", "password": self.password} if asks else TOKEN in scope["headers"]
            if asks or not good:
                said = {"token": TOKEN[1].decode()} if good else {"error": "invalid user ID or password", "code": 3}
                await send({"type": "http.response.start", "status": 200 if good else 400, "headers": []})
                await send({"type": "http.response.body", "body": json.dumps(said).encode()})
                return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/v3/kv/range":
            self.lists += 1
            await send({"type": "http.response.body", "body": json.dumps(self.range).encode()})
            return
        self.watched.append(body["create_request"])
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        leaving = asyncio.create_task(receive())
        line = asyncio.create_task(self.lines.get())
        await asyncio.wait([leaving, line], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not line.cancel():
            await send({"type": "http.response.body", "body": line.result() + b"\n"})


@pytest.fixture
async def etcd() -> AsyncIterator[tuple[FakeEtcd, dict[str, object]]]:
    """Yield a fake one, and the settings of a discovery that asks it."""
    fake = FakeEtcd()
    async with serve(fake) as url:
        yield fake, {"etcd": {"urls": [url], "prefix": "/e/"}}


@pytest.mark.parametrize(
    ("line", "complaint", "lists"),
    [
        (b"{", "an invalid event", 2),  # what it said is not known: all is read again
        (b'{"error":{"grpc_code":14,"message":"etcdserver: no leader"}}', "ended: etcdserver: no leader", 1),
        (
            b'{"result":{"canceled":true,"cancel_reason":"permission denied"}}',
            "etcd ended the watch: permission denied",
            1,
        ),
        (b'{"result":{"compact_revision":"nine"}}', "a revision that is no number", 2),
        (b'{"result":{"events":[{"kv":{"key":"*"}}]}}', "not base64", 2),
    ],
)
async def test_faults_of_a_watch_are_reported(
    follow: Follow,
    etcd: tuple[FakeEtcd, dict[str, object]],
    line: bytes,
    complaint: str,
    lists: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And it is begun again; what is known stays."""
    fake, settings = etcd
    async with follow(**settings) as one:
        fake.lines.put_nowait(line)
        await until(lambda: len(fake.watched) == 2)
        assert complaint in caplog.text
        assert one.urls == {"a": "http://127.0.0.1:1"}
        assert fake.lists == lists


async def test_all_serve_the_models_of_their_source_but_for_those_that_say_theirs(
    follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]]
) -> None:
    """Else a model of another source's would be sent to them."""
    fake, settings = etcd
    own = json.dumps({"url": "http://127.0.0.1:2", "models": ["m2"]})
    fake.range["kvs"] = [
        {"key": text("/e/a"), "value": text("http://127.0.0.1:1")},
        {"key": text("/e/b"), "value": text(own)},
    ]
    async with follow(etcd=settings["etcd"] | {"models": ["m1"]}) as one:
        serves = {str(each.id): [each.serves(model) for model in ("m1", "m2")] for each in one.cluster.endpoints}
        assert serves == {"a": [True, False], "b": [False, True]}


async def test_a_source_no_longer_used_is_not_failing(follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]]) -> None:
    """Its series ends with the asking, or an alert would go on for a source that a reload took away."""
    fake, settings = etcd
    async with follow(**settings) as one:
        fake.lines.put_nowait(b"{")
        await until(lambda: one.failing == 1.0)
    assert one.failing is None


async def test_a_compacted_revision_is_no_trouble(
    follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    """All of it is read again, and the watch goes on from there."""
    fake, settings = etcd
    async with follow(**settings) as one:
        fake.range = {"header": {"revision": "50"}}
        fake.lines.put_nowait(b'{"result":{"header":{"revision":"50"},"compact_revision":"40","canceled":true}}')
        await until(lambda: len(fake.watched) == 2 and not one.urls)
        assert [create["start_revision"] for create in fake.watched] == [8, 51]
        assert fake.lists == 3  # of an empty fleet a second one
        assert "discovery c/etcd" not in caplog.text


async def test_a_watch_goes_on_after_the_last_event(follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]]) -> None:
    """Neither twice nor with a gap."""
    fake, settings = etcd
    async with follow(**settings) as one:
        event = {"kv": {"key": text("/e/b"), "value": text('{"url":"http://127.0.0.1:2"}')}}
        fake.lines.put_nowait(json.dumps({"result": {"header": {"revision": "9"}, "events": [event]}}).encode())
        await until(lambda: len(fake.watched) == 2 and len(one.urls) == 2)
        assert (sorted(one.urls), fake.watched[1]["start_revision"], fake.lists) == (["a", "b"], 10, 1)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (b"", "must start with http"),
        (b"ftp://x", "scheme must be http or https"),
        (b"\xff", "neither a URL nor an object in JSON"),
        (b"{", "neither a URL nor an object in JSON"),
        (b"[1]", "must start with http"),
        (b'{"url":"http://x","api_key":["sk-secret"]}', "api_key"),
    ],
)
def test_a_value_that_is_no_endpoint(value: bytes, complaint: str) -> None:
    """Says why, without what it holds."""
    for credentials in (False, True):
        fault = endpoint_of("a", value, credentials=credentials)
        assert isinstance(fault, LeftOut)
        assert fault.name == "key a"
        assert complaint in fault.why
        assert "sk-" not in fault.why


@pytest.mark.parametrize("field", [{"api_key": {"file": "/etc/hostname"}}, {"api_key": "sk-1"}, {"ca_file": "/x"}])
async def test_a_key_names_no_file_and_no_credential(
    follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]], field: dict[str, object]
) -> None:
    """Unless the operator allows it for this source: a writer of one key could make the proxy send any file away."""
    fake, settings = etcd
    fake.range["kvs"] = [
        {"key": text("/e/a"), "value": text("http://127.0.0.1:1")},
        {"key": text("/e/b"), "value": text(json.dumps({"url": "http://127.0.0.1:2", **field}))},
    ]
    async with follow(**settings) as one:
        assert one.urls == {"a": "http://127.0.0.1:1"}
        (left_out,) = one.cluster.poller.left_out["etcd"]
        assert str(left_out).startswith(f"key b: names `{next(iter(field))}`, which this source may not")
    async with follow(etcd={**settings["etcd"], "credentials": True}) as other:  # type: ignore[dict-item]
        assert set(other.urls) == {"a", "b"}


@pytest.mark.parametrize("revision", ["abc", "9" * 5000])
async def test_an_absurd_revision_is_no_end(
    follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]], revision: str
) -> None:
    """Everything is listed again, and the next change is followed."""
    fake, settings = etcd
    event = {"kv": {"key": text("/e/b"), "value": text("http://127.0.0.1:2")}}
    async with follow(**settings) as one:
        for number in (revision, "12"):
            said = {"result": {"header": {"revision": number}, "events": [event]}}
            fake.lines.put_nowait(json.dumps(said).encode())
        await until(lambda: len(one.urls) == 2)
        assert fake.lists == 2
        await until(lambda: one.failing == 0)


async def test_a_fleet_does_not_vanish_by_one_reading(follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]]) -> None:
    """An event that takes the last key away is believed only when a list agrees."""
    fake, settings = etcd
    gone = {"type": "DELETE", "kv": {"key": text("/e/a")}}
    said = json.dumps({"result": {"header": {"revision": "9"}, "events": [gone]}}).encode()
    async with follow(**settings) as one:
        fake.lines.put_nowait(said)
        await until(lambda: fake.lists == 2)
        await until(lambda: len(fake.watched) == 2)
        assert one.urls == {"a": "http://127.0.0.1:1"}
        fake.range = {"header": {"revision": "10"}}
        fake.lines.put_nowait(said)
        await until(lambda: not one.urls)


def test_values_that_are_endpoints() -> None:
    """A URL alone, as text or as JSON, or an object."""
    for value in (b"http://127.0.0.1:1", b'"http://127.0.0.1:1"', b'{"url":"http://127.0.0.1:1"}'):
        assert endpoint_of("a", value) == EndpointSettings(id="a", url="http://127.0.0.1:1")


async def test_an_etcd_that_wants_a_password(
    follow: Follow, etcd: tuple[FakeEtcd, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    """The list and the watch carry the token; a wrong password is said, and shown nowhere."""
    fake, settings = etcd
    fake.password = "s3cret"
    where = {**settings["etcd"], "user": "kvproxy", "password": "s3cret"}  # type: ignore[dict-item]
    async with follow(etcd=where) as one:
        assert one.urls == {"a": "http://127.0.0.1:1"}
        await until(lambda: fake.watched)
    async with follow(etcd={**where, "password": "wr0ng"}) as other:
        assert not other.urls
        said = other.cluster.poller.complaints["etcd"]
        assert said.startswith("etcd does not let user 'kvproxy' in")
        assert "invalid user ID or password" in said
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text + said
