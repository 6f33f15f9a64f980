"""`kvproxy drain`, `undrain`, `reload` and `explain` against a real admin listener."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.app import Proxy
from kvproxy.cli import main
from kvproxy.operate.admin.app import build_admin_app
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.explain import ExplainOptions
from kvproxy.operate.commands.explain import run as explain
from kvproxy.operate.commands.operate import AdminAddress, drain_endpoint
from kvproxy.operate.commands.operate import reload_configuration as reload_config
from kvproxy.operate.commands.reload import FileReloader
from kvproxy.operate.commands.status import render_page
from kvproxy.operate.receipts.receipt import Receipt, encode_receipt
from kvproxy.operate.runtime.history import History
from kvproxy.proxy.listener.server import Server
from tests.operate.admin.support import admin_of
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve

FILE = """
endpoints: {{a: {url}, b: {url}/b}}
admin: {{token: s3cret}}
filters: [request_id, inference_request, kvcache, router]
"""


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Proxy, str, Path]]:
    """Yield a proxy from a file, its admin listener's URL, and the file; the token is in the environment."""
    monkeypatch.setenv("KVPROXY_ADMIN_TOKEN", "s3cret")
    file = tmp_path / "config.yaml"
    async with serve(FakeEngine("a")) as engine:
        file.write_text(FILE.format(url=engine))
        source = ConfigSource(path=str(file))
        async with (
            Proxy(source.load()[0]) as proxy,
            Server(proxy.admin, drain_s=0.2) as admin,
            FileReloader(proxy, source, interval_s=0.0),
        ):
            yield proxy, admin.url, file


async def done(command: list[str]) -> int:
    """Its exit status, beside the proxy's own loop."""
    return await asyncio.to_thread(main, command)


async def test_draining_and_back(running: tuple[Proxy, str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoint is found by its id alone; the token comes from the environment."""
    proxy, url, _ = running
    endpoint = proxy.clusters["default"].endpoints[0]
    assert await done(["drain", "a", "--url", url]) == 0
    assert endpoint.draining
    assert capsys.readouterr().out == "endpoint 'a' of cluster 'default' gets no new requests and has none running\n"
    assert await done(["undrain", "a", "--url", url]) == 0
    assert not endpoint.draining
    assert await done(["drain", "aa", "--url", url, "--cluster", "default"]) == 1
    assert "there is no endpoint 'aa' (did you mean 'a'?)" in capsys.readouterr().err


def test_an_endpoint_of_several_clusters() -> None:
    """Its cluster must be named."""
    listed = {"clusters": {"small": [{"id": "a"}], "large": [{"id": "a"}]}}
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json=listed if request.method == "GET" else {"in_flight": 3})

    out, err = io.StringIO(), io.StringIO()
    address, transport = AdminAddress("http://127.0.0.1:1"), httpx.MockTransport(handle)
    assert drain_endpoint(address, "a", out=out, err=err, transport=transport) == 1
    assert "clusters small, large have an endpoint 'a': name one (--cluster)" in err.getvalue()
    assert drain_endpoint(address, "a", cluster="large", out=out, err=err, transport=transport) == 0
    assert asked[-1] == "/endpoints/large/a/drain"
    assert "it finishes 3 running requests" in out.getvalue()
    assert drain_endpoint(address, "a", cluster="larg", out=out, err=err, transport=transport) == 1
    assert "there is no cluster 'larg' (did you mean 'large'?)" in err.getvalue()


def test_waiting_until_an_endpoint_has_finished() -> None:
    """Its requests are counted until there are none."""
    left = [2, 2, 1, 0]
    pauses: list[float] = []

    def handle(request: httpx.Request) -> httpx.Response:
        running = left.pop(0) if request.method == "POST" or pauses else left[0]
        return httpx.Response(200, json={"clusters": {"c": [{"id": "a", "in_flight": running}]}, "in_flight": running})

    out, err = io.StringIO(), io.StringIO()
    address, transport = AdminAddress("http://127.0.0.1:1"), httpx.MockTransport(handle)
    options = {"out": out, "err": err, "transport": transport}
    assert drain_endpoint(address, "a", wait=True, sleep=pauses.append, **options) == 0  # type: ignore[arg-type]
    assert (len(pauses), left) == (3, [])
    assert out.getvalue().endswith("it finishes 2 running requests\nit has finished all of them\n")


@pytest.mark.parametrize(
    ("left", "wait", "said"),
    [
        ([3, 0], False, ["its streams went on elsewhere"]),
        ([3, 1], False, ["streams went on elsewhere; it has 1 left (guided)"]),
        ([3, 1, 1, 0], True, ["streams went on elsewhere; it has 1 left (guided)", "it has none left"]),
    ],
)
def test_streams_of_a_drained_endpoint_are_moved(left: list[int], wait: bool, said: list[str]) -> None:
    """Once, or at each look while the command waits, since streams may begin meanwhile."""
    asked: list[str] = []
    counts = iter(left[1:])

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path.endswith("/move"):
            return httpx.Response(200, json={"moved": 2, "staying": {"guided": 1}})
        running = left[0] if request.method == "POST" or len(asked) == 1 else next(counts)
        return httpx.Response(200, json={"clusters": {"c": [{"id": "a", "in_flight": running}]}, "in_flight": running})

    out, err = io.StringIO(), io.StringIO()
    address, transport = AdminAddress("http://127.0.0.1:1"), httpx.MockTransport(handle)
    options = {"out": out, "err": err, "transport": transport, "sleep": lambda _: None}
    assert drain_endpoint(address, "a", wait=wait, move=True, **options) == 0  # type: ignore[arg-type]
    assert out.getvalue().splitlines()[1:] == said
    assert asked.count("/endpoints/c/a/move") == len(left) - 1
    assert next(counts, None) is None


async def test_reloading(running: tuple[Proxy, str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A good file is applied; a bad one is not, and its problems come with their places."""
    proxy, url, file = running
    file.write_text(file.read_text() + "policy: random\n")
    assert await done(["reload", "--url", url]) == 0
    assert "configuration reloaded" in capsys.readouterr().out
    assert proxy.config.clusters["default"].policy.value == "random"
    file.write_text(file.read_text() + "polcy: random\n")
    assert await done(["reload", "--url", url]) == 1
    said = capsys.readouterr().err
    assert "not reloaded, the old configuration stays" in said
    assert f"{file}:6:1: polcy: unknown key (did you mean 'policy'?)" in said


async def test_a_refused_file_is_shown_until_one_loads(running: tuple[Proxy, str, Path]) -> None:
    """On the page, in `status` and among the events: since when the file is not in force, and the first problem."""
    proxy, url, file = running
    good = file.read_text()
    headers = {"authorization": "Bearer s3cret", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as client:

        async def live(text: str) -> dict[str, Any]:
            file.write_text(text)
            written = file.stat().st_mtime - 2400
            os.utime(file, (written, written))
            await client.post("/reload")
            proxy.admin = build_admin_app(proxy, History(proxy))
            async with admin_of(proxy, **headers) as fresh:
                shown: dict[str, Any] = (await fresh.get("/live")).json()
            return shown

        refused = await live(good + "polcy: random\nplicy: x\n")
        [finding] = [one for one in refused["findings"] if one["where"] == "configuration"]
        assert finding["what"] == (
            "config.yaml changed 40 min ago and is not in force: "
            "5:1 polcy: unknown key (did you mean 'policy'?), and 1 more"
        )
        assert (finding["severity"], round(finding["age_s"], -1)) == ("problem", 2400.0)
        assert refused["config_file"]["refused"]
        assert refused["events"][0]["what"] == "config.yaml refused: unknown key"
        assert "problem: configuration: config.yaml changed 40 min ago" in render_page(refused)
        loaded = await live(good)
        assert not [one for one in loaded["findings"] if one["where"] == "configuration"]
        assert (loaded["config_file"]["name"], loaded["config_file"]["refused"]) == ("config.yaml", False)
        assert loaded["events"][0]["what"] == "config.yaml reloaded"


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1 and what to look at."""
    assert main(["reload", "--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kvproxy reload: nothing answers at http://127.0.0.1:1")
    assert "the old configuration stays" not in said
    assert "Errno" not in said
    out, err = io.StringIO(), io.StringIO()
    refusing = httpx.MockTransport(lambda request: httpx.Response(401, json={"error": "no"}))
    assert reload_config(AdminAddress("http://127.0.0.1:1"), out=out, err=err, transport=refusing) == 1
    assert "--token-file FILE, or KVPROXY_ADMIN_TOKEN" in err.getvalue()


def decisions(*ids: str) -> httpx.MockTransport:
    """Return a proxy that remembers these requests, the newest first."""
    listed = [
        {"request_id": one, "ended_at": "2026-01-02T03:04:05.678+00:00", "model": "m", "cluster": "default",
         "endpoint": "a", "policy": "kv_aware", "reason": "overlap", "status": 200, "end": "completed", "retries": 1,
         "prompt_tokens": 640, "matched_tokens": 512, "cached_tokens": 528, "ttft_s": 0.125, "duration_s": 1.5,
         "number": number}
        for number, one in enumerate(ids)
    ]  # fmt: skip
    candidates = [
        {"endpoint": "a", "cost": 0.5, "matched_tokens": 512, "source": "precise", "age_s": 3.0},
        {"endpoint": "b", "cost": 0.75, "matched_tokens": 0, "source": None, "age_s": None},
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        number = request.url.path.removeprefix("/decisions").strip("/")
        one = {"decisions": listed} if not number else {**listed[int(number)], "candidates": candidates}
        return httpx.Response(200, json=one)

    return httpx.MockTransport(answer)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(request_id: str, transport: httpx.BaseTransport, *, file: Path | None = None) -> tuple[int, str, str]:
    """Exit status and output of `kvproxy explain`."""
    out, err = io.StringIO(), io.StringIO()
    options = ExplainOptions(request_id, file, AdminAddress("http://127.0.0.1:1"))
    return explain(options, out=out, err=err, transport=transport), out.getvalue(), err.getvalue()


@pytest.mark.usefixtures("folder")
def test_explain_asks_the_proxy_where_there_are_no_receipts() -> None:
    """As much as it remembers, costs included, and what would tell more; the 13 characters that the page shows are
    enough."""
    status, out, _ = told("046f774aa2bcd…", decisions("046f774aa2bcd15e11", "1234"))
    assert status == 0
    for said in ("Request 046f774aa2bcd15e11", "Sent to a", "reason overlap (no other endpoint holds more",
                 "Predicted: 512 of 640 tokens cached", "status 200, completed, after 2 attempts",
                 "cached by the engine's count: 528 of 640", "receipts: {path:"):  # fmt: skip
        assert said in out, said
    rows = [line.split() for line in out.splitlines()]
    assert [">", "a", "0.5", "512", "precise,", "3.0", "s", "old"] in rows
    assert ["b", "0.75", "0", "-"] in rows


@pytest.mark.usefixtures("folder")
def test_a_beginning_of_several_ids() -> None:
    """They are named; an exact id wins over longer ones; one that is not remembered is said so."""
    status, _, err = told("04", decisions("046f", "04aa"))
    assert status == 1
    assert "several requests begin so: 046f, 04aa: give more of the id" in err
    assert told("046f", decisions("046f", "046f77"))[0] == 0
    status, _, err = told("99", decisions("046f"))
    assert status == 1
    assert "no receipt of 99 in ./receipts.jsonl, and the proxy at http://127.0.0.1:1 no longer has it" in err


def test_explain_finds_receipts_by_how_the_id_begins(folder: Path) -> None:
    """In the file; a file that was named is the only place looked at."""
    file = folder / "receipts.jsonl"
    ids = ("046f774aa2bcd1", "046f999", "7")
    file.write_bytes(b"".join(encode_receipt(Receipt("2026-01-02T03:04:05Z", one, "completed", 1.0)) for one in ids))
    status, out, _ = told("046f774aa2bcd", decisions())
    assert (status, out.splitlines()[0]) == (0, "Request 046f774aa2bcd1, ended 2026-01-02T03:04:05Z")
    status, _, err = told("046f", decisions(), file=file)
    assert status == 1
    assert "several requests begin so" in err
    status, _, err = told("5", decisions("5"), file=file)
    assert (status, err) == (1, f"kvproxy explain: no receipt of 5 in {file}\n")
    assert told("5", decisions("5"))[0] == 0


async def test_status_as_json(running: tuple[Proxy, str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The page's data, for scripts."""
    _, url, _ = running
    assert await done(["status", "--json", "--url", url]) == 0
    live = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in live["endpoints"]] == ["a", "b"]
