"""Every Python program the documentation shows runs."""

from __future__ import annotations

import ast
import importlib
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import Request

import kvproxy
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.routing.policy import PickRequest
from tests.cache.media.samples import png
from tests.cache.support import NOWHERE, long_text
from tests.docs.blocks import ROOT, block, blocks
from tests.docs.world import MODEL, world
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.loopback import serve

#: Page, and a text of its program; the filter's is installed and run by tests/docs/test_documented_filter.
PROGRAMS = {
    "README.md": "http_client=http",
    "docs/quickstart.md": "from openai import OpenAI",
    "docs/kvcache.md": "from openai import OpenAI",
    "docs/extending.md": "# model_policy.py",
}


#: Programs of one page, each run as it stands but for the first of the middleware, which lacks its forwarding.
PYTHON = "docs/python.md"
WHOLE = (
    "client = AsyncOpenAI(",
    "client = OpenAI(",
    'app.mount("/llm", proxy)',
    "kvproxy.Router(",
    "simulated_engines(3)",
)
MIDDLEWARE = "app.add_middleware"
BY_ITSELF = "kvproxy.preferred(request)"
STEP = ("docs/extending.md", "class Maintenance(Step)")
POLICY = ("docs/extending.md", "class FewestPending(Policy)")


def test_there_are_no_others() -> None:
    """A new program needs a test."""
    assert sorted(block.page for block in blocks("python")) == sorted(
        [*PROGRAMS, STEP[0], POLICY[0], *[PYTHON] * (len(WHOLE) + 2)]
    )


def test_every_public_name_has_its_entry_and_an_example() -> None:
    """In the reference, and in a program of the page that runs."""
    names = {name for name in kvproxy.__all__ if name.isidentifier() and not name.startswith("_")}
    entries = re.findall(r"^::: kvproxy\.(\w+)$", (ROOT / "docs/python-reference.md").read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(names)
    programs = "\n".join(each.text for each in blocks("python") if each.page == PYTHON)
    assert not [name for name in names if not re.search(rf"\b{name}\b", programs)]


async def test_the_step_of_the_page_refuses_as_it_says() -> None:
    """A filter of a few lines."""
    names: dict[str, Any] = {}
    exec(compile(block(*STEP), "step", "exec"), names)
    app = names["Maintenance"](Inner(), metrics=Metrics(), clock=FakeClock())
    reply = await call(app, http_scope())
    assert (reply.status, reply.json["error"]["code"], reply.headers[b"retry-after"]) == (503, "maintenance", b"60")


def test_the_policy_of_the_page_chooses_the_fewest_pending_tokens() -> None:
    names: dict[str, Any] = {}
    exec(compile(block(*POLICY), "policy", "exec"), names)
    policy = names["FewestPending"](rng=random.Random(1))
    candidates = [SimpleNamespace(load=SimpleNamespace(pending_tokens=tokens)) for tokens in (300, 100, 200)]
    choice = policy.choose(PickRequest(), candidates, 0.0)
    assert (choice.index, choice.reason) == (1, "fewest_pending")
    assert choice.reason in policy.reasons


async def test_a_client_needs_nothing_but_the_url(tmp_path: Path) -> None:
    """The quick start's client gets an answer."""
    async with world(tmp_path) as place:
        program = place.told(block("docs/quickstart.md", PROGRAMS["docs/quickstart.md"]))

        def ask() -> str | None:
            names: dict[str, object] = {}
            exec(compile(program, "quickstart", "exec"), names)
            client = names["client"]
            messages = [{"role": "user", "content": "Hello"}]
            with client:  # type: ignore[attr-defined]
                return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content  # type: ignore[attr-defined,no-any-return]

        assert await anyio.to_thread.run_sync(ask)


async def test_the_readmes_client_routes_in_its_own_process(tmp_path: Path) -> None:
    """It needs no proxy that runs."""
    async with world(tmp_path) as place:
        names: dict[str, Any] = {}
        exec(compile(place.told(block("README.md", PROGRAMS["README.md"])), "readme", "exec"), names)
        messages = [{"role": "user", "content": "Hello"}]
        async with names["http"]:
            answer = await names["client"].chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content


@pytest.mark.parametrize("containing", WHOLE)
async def test_every_way_from_python_runs_as_it_stands(
    tmp_path: Path, containing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each against two engines; the router's is answered, and the one that is mounted answers below its prefix."""
    async with world(tmp_path) as place:
        names: dict[str, Any] = {}
        program = compile(place.told(block(PYTHON, containing)), "program", "exec")
        await anyio.to_thread.run_sync(lambda: exec(program, names))
        if "Router" in containing:
            assert '"choices"' in capsys.readouterr().out
        if "app" in names:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
            async with serve(names["app"], lifespan="on") as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
                assert (await client.post("/llm/v1/chat/completions", json=body)).status_code == 200
                assert "kvproxy_requests_total" in (await client.get("/kvproxy/metrics")).text


async def test_a_picture_is_sent_twice_and_reused_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's program prints what the engine counted and reused."""
    (tmp_path / "screenshot.png").write_bytes(png(1280, 960, size_bytes=100_000))
    async with world(tmp_path) as place:
        program = place.told(block("docs/kvcache.md", PROGRAMS["docs/kvcache.md"]))
        program = program.replace("screenshot.png", str(tmp_path / "screenshot.png"))
        await anyio.to_thread.run_sync(lambda: exec(compile(program, "media", "exec"), {}))
    (prompt, new), (again, cached) = (map(int, line.split()) for line in capsys.readouterr().out.splitlines())
    assert prompt == again > 1200
    assert new < 100
    assert cached > 0.95 * prompt


@pytest.mark.filterwarnings("default::DeprecationWarning")
async def test_the_middleware_tells_an_app_where_to_send_a_chat(tmp_path: Path) -> None:
    """Turn after turn to one engine, by the proxy's own decision."""
    chosen: list[str | None] = []

    async def recorded(request: Request) -> str | None:
        chosen.append(await kvproxy.choose(request))
        return chosen[-1]

    async with world(tmp_path) as place:
        program = place.told(block(PYTHON, MIDDLEWARE))
        names: dict[str, object] = {}
        exec(compile(program, "middleware", "exec"), names)
        names["choose"] = recorded
        body = {"model": MODEL, "messages": [{"role": "user", "content": long_text("w")}]}
        async with serve(names["app"], lifespan="on") as url, httpx.AsyncClient(base_url=url, timeout=60) as client:  # type: ignore[arg-type]
            for _ in range(3):
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
    assert len(chosen) == 3
    assert len(set(chosen)) == 1
    assert chosen[0] in ("a", "b")


async def test_an_app_decides_by_itself_what_holds_most(tmp_path: Path) -> None:
    """The second turn finds tokens where the first one went; an engine that is gone is a 502 and reported."""
    async with world(tmp_path) as place:
        names: dict[str, Any] = {}
        exec(compile(place.told(block(PYTHON, BY_ITSELF)), "deciding", "exec"), names)
        body = {"model": MODEL, "messages": [{"role": "user", "content": long_text("w")}]}
        async with (
            names["http"],
            serve(names["app"], lifespan="on") as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            answers = [await client.post("/v1/chat/completions", json=body) for _ in range(2)]
            names["ENGINES"]["a"] = NOWHERE
            gone = await client.post("/v1/chat/completions", json=body)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["x-held"] == "0" < answers[1].headers["x-held"]
    assert gone.status_code == 502


def test_every_public_name_is_described_and_shown() -> None:
    """Each has a docstring, and is in a program that is run: of a page, or of a sample."""
    programs = [one.text for one in blocks("python")] + [path.read_text() for path in ROOT.glob("samples/*/*.py")]
    modules = {"kvproxy": kvproxy.__all__, "kvproxy.testing": ["simulated_engines"]}
    for module, names in modules.items():
        for name in set(names) - {"__version__"}:
            assert getattr(importlib.import_module(module), name).__doc__, name
            assert any(re.search(rf"\b{name}\b", text) for text in programs), name


@pytest.mark.parametrize(("file", "name"), [("litellm", "KVCacheRouting"), ("ray", "KVCacheRouter")])
def test_the_plug_ins_are_described_and_shown(file: str, name: str) -> None:
    """Their packages may be missing here; the samples are run by `make test-hosts`."""
    tree = ast.parse((ROOT / "kvproxy" / f"{file}.py").read_text())
    (found,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    assert found.name == name
    members = [one for one in found.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert ast.get_docstring(found)
    assert all(ast.get_docstring(one) for one in members if not one.name.startswith("_"))
    assert name in (ROOT / "samples" / file / "app.py").read_text()
