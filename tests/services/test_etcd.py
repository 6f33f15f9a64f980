"""Endpoints from a real etcd: leases, compaction, a restart, and two members of which one is away."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.followed import Follow, follow
from tests.support.certificates import Certificate, make_certificate
from tests.support.ports import free_port
from tests.support.until import until, until_says

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (apt install etcd-server)"),
]
__all__ = ["follow"]

PREFIX = "/kvproxy/endpoints/"


class Etcd:
    """A member on its own, with a data folder that outlives it."""

    def __init__(self, folder: Path, *, tls: Certificate | None = None) -> None:
        self._folder = folder
        self._tls = tls
        self._ports = free_port(), free_port()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._ports[0]}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Etcd]:
        peer = f"http://127.0.0.1:{self._ports[1]}"
        process = await asyncio.create_subprocess_exec(
            "etcd",
            *("--name", "one", "--data-dir", str(self._folder), "--log-level", "error"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"),
            *(("--cert-file", self._tls.certificate, "--key-file", self._tls.private_key) if self._tls else ()),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await until_says(True, self._is_up)
            yield self
        finally:
            process.kill()
            await process.wait()

    async def call(self, path: str, *, token: str = "", **body: Any) -> dict[str, Any]:
        verify = ssl.create_default_context(cafile=str(self._tls.certificate)) if self._tls else False
        async with httpx.AsyncClient(base_url=self.url, verify=verify, trust_env=False) as http:
            answer = await http.post(f"/v3/{path}", json=body, headers={"authorization": token} if token else {})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def put(self, name: str, value: object, **more: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        await self.call("kv/put", key=_text(PREFIX + name), value=_text(text), **more)

    async def delete(self, name: str) -> None:
        await self.call("kv/deleterange", key=_text(PREFIX + name))

    async def compact(self) -> None:
        answer = await self.call("kv/range", key=_text("x"))
        await self.call("kv/compaction", revision=answer["header"]["revision"], physical=True)

    async def _is_up(self) -> bool:
        try:
            await self.call("kv/range", key=_text("x"))
        except httpx.HTTPError:
            return False
        return True


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def source(*urls: str) -> dict[str, Any]:
    return {"etcd": {"urls": urls, "prefix": PREFIX}}


async def test_endpoints_come_change_and_go_with_their_leases(follow: Follow, tmp_path: Path) -> None:
    """A URL or an object; a key below another prefix is none; what is no endpoint is said and left out."""
    async with Etcd(tmp_path).running() as etcd:
        await etcd.put("a", "http://127.0.0.1:1")
        await etcd.call("kv/put", key=_text("/kvproxy/other/x"), value=_text("http://127.0.0.1:9"))
        async with follow(**source(etcd.url)) as one:
            assert one.urls == {"a": "http://127.0.0.1:1"}
            lease = (await etcd.call("lease/grant", TTL=60))["ID"]
            await etcd.put("b", {"url": "http://127.0.0.1:2", "models": ["m"], "instance_id": "i"}, lease=lease)
            await until(lambda: len(one.urls) == 2)
            assert (one.endpoint("b").models, one.endpoint("b").instance_id) == ({"m"}, "i")
            await etcd.put("c", {"url": "http://127.0.0.1:3", "wait": 1})
            await until(lambda: "etcd" in one.cluster.poller.left_out)
            assert str(one.cluster.poller.left_out["etcd"][0]).startswith("key c: wait: Extra inputs")
            assert len(one.urls) == 2
            await etcd.call("lease/revoke", ID=lease)
            await until(lambda: one.urls == {"a": "http://127.0.0.1:1"})
            await etcd.delete("c")
            await until(lambda: not one.cluster.poller.left_out)
            await etcd.delete("a")
            await until(lambda: not one.urls)


async def test_a_compacted_revision_is_read_again(follow: Follow, tmp_path: Path) -> None:
    """etcd is away, comes back, and has forgotten the revision that the watch goes on from."""
    etcd = Etcd(tmp_path)
    async with etcd.running():
        await etcd.put("a", "http://127.0.0.1:1")
        entered = follow(**source(etcd.url))
        one = await entered.__aenter__()
        assert one.failing == 0
    try:
        await until(lambda: one.failing == 1)
        assert one.urls == {"a": "http://127.0.0.1:1"}
        one.pauses.hold()
        async with etcd.running():
            for number in range(5):
                await etcd.put(f"n{number}", f"http://127.0.0.1:{10 + number}")
            await etcd.delete("a")
            await etcd.compact()
            one.pauses.go_on()
            await until(lambda: sorted(one.urls) == [f"n{number}" for number in range(5)])
            assert one.failing == 0
    finally:
        await entered.__aexit__(None, None, None)


async def test_pages_and_a_member_that_is_away(follow: Follow, tmp_path: Path) -> None:
    """The next member is asked; more keys than one page are put together."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    async with Etcd(tmp_path).running() as etcd:
        for start in range(0, 1200, 100):
            puts = [
                {"request_put": {"key": _text(f"{PREFIX}e{n}"), "value": _text(f"http://127.0.0.1:{1000 + n}")}}
                for n in range(start, start + 100)
            ]
            await etcd.call("kv/txn", success=puts)
        async with follow(**source(nowhere, etcd.url)) as one:
            await until(lambda: len(one.urls) == 1200)
            await until(lambda: one.failing == 0)


async def test_a_user_with_a_password(follow: Follow, tmp_path: Path) -> None:
    """etcd's authentication is on: a user who may read the prefix is let in, with the right password alone."""
    async with Etcd(tmp_path).running() as etcd:
        await etcd.put("a", "http://127.0.0.1:1")
        for name in ("root", "reader"):
            await etcd.call("auth/user/add", name=name, password=f"pass-of-{name}")
            await etcd.call("auth/role/add", name=name)
            await etcd.call("auth/user/grant", user=name, role=name)
        allowed = {"permType": "READ", "key": _text(PREFIX), "range_end": _text(PREFIX[:-1] + "0")}
        await etcd.call("auth/role/grant", name="reader", perm=allowed)
        await etcd.call("auth/enable")
        entered = {"urls": [etcd.url], "prefix": PREFIX, "user": "reader", "password": "pass-of-reader"}
        async with follow(etcd=entered) as one:
            assert one.urls == {"a": "http://127.0.0.1:1"}
            root = await etcd.call("auth/authenticate", name="root", password="pass-of-root")
            await etcd.put("b", "http://127.0.0.1:2", token=root["token"])
            await until(lambda: len(one.urls) == 2)
        for wrong in ({"password": "wrong"}, {"user": "", "password": None}):
            async with follow(etcd={**entered, **wrong}) as refused:
                assert not refused.urls
                assert refused.failing == 1


async def test_over_tls(follow: Follow, tmp_path: Path) -> None:
    """Verified with the authority that is named, and with no other."""
    tls = make_certificate(tmp_path, "127.0.0.1")
    async with Etcd(tmp_path / "data", tls=tls).running() as etcd:
        await etcd.put("a", "http://127.0.0.1:1")
        where = source(etcd.url)["etcd"]
        async with follow(etcd={**where, "ca_file": str(tls.certificate)}) as one:
            assert one.urls == {"a": "http://127.0.0.1:1"}
            await etcd.put("b", "http://127.0.0.1:2")
            await until(lambda: len(one.urls) == 2)
        async with follow(etcd=where) as other:
            assert not other.urls
            assert "ConnectError" in other.cluster.poller.complaints["etcd"]
