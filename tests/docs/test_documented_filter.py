"""The filter in docs/extending.md, installed as its distribution would be and run in its documented chain."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproxy.operate.config.load import load_config
from kvproxy.operate.filter_plugins import discover
from kvproxy.proxy.filter_settings import FILTER_SETTINGS
from kvproxy.proxy.filters.chain import build_chain
from kvproxy.proxy.filters.registry import list_filters
from kvproxy.proxy.settings import FilterSpec
from tests.support.asgi import Inner, call, http_scope
from tests.support.filter_context import counted, filter_context

DOCS = Path(__file__).parents[2] / "docs"


def block(language: str, *, containing: str) -> str:
    """Return the code block of the page that contains some text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return str(found)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield the example's module and metadata on the import path, as an installer leaves them."""
    (tmp_path / "model_policy.py").write_text(block("python", containing="model_policy.py"))
    info = tmp_path / "model_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: model-policy\nVersion: 1.0\n")
    line = block("toml", containing="entry-points").splitlines()[1].replace('"', "")
    (info / "entry_points.txt").write_text(f"[kvproxy.filters]\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("model_policy", None)


async def answer(key: str, model: str) -> tuple[int, object, float]:
    """Status, error code and count of refusals of one request through the documented chain (all but its router)."""
    types = {**list_filters(), **discover({"model_policy"})}
    config = load_config(
        block("yaml", containing="model_policy"),
        extra_filters={"model_policy": types["model_policy"].settings},
    )
    context = filter_context()
    specs: list[FilterSpec] = [spec for spec in config.filters if spec.name != "router"]
    names = ["request_id", "access_log", "auth", "inference_request", "model_policy", "kvcache"]
    assert [spec.name for spec in specs] == names
    specs = [spec for spec in specs if spec.name != "kvcache"]
    chain = build_chain(specs, Inner(chunks=(b"{}",)), context=context, types=types)
    scope = http_scope("/v1/chat/completions", method="POST", headers=[(b"authorization", b"Bearer " + key.encode())])
    reply = await call(chain, scope, body=json.dumps({"model": model, "messages": []}).encode())
    refused = counted(context, "kvproxy_local_replies_total", status="403", reason="model_not_allowed")
    return reply.status, reply.json.get("error", {}).get("code"), refused


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("key", "model", "expected"),
    [
        ("sk-alice", "large-1", (200, None, 0.0)),
        ("sk-bob", "small-1", (200, None, 0.0)),
        ("sk-bob", "large-1", (403, "model_not_allowed", 1.0)),
        ("sk-eve", "small-1", (401, "invalid_api_key", 0.0)),
    ],
)
async def test_the_documented_filter_works(key: str, model: str, expected: tuple[int, object, float]) -> None:
    """A filter copied from the page does what the page says."""
    assert await answer(key, model) == expected


def test_every_filter_of_the_core_is_described() -> None:
    """A section of the page for each, or a page of its own."""
    page = (DOCS / "filters.md").read_text()
    headings = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert set(FILTER_SETTINGS) == headings | {"kvcache"}
    assert "(kvcache.md)" in page
