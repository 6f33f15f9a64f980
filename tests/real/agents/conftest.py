"""One vLLM of the tiny model that also renders, so that what it computes can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.vllm import RENDER_PATHS
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up

#: The tiny model's own template prints calls as they come, keys in whatever order; this one as models want them.
TEMPLATE = Path(__file__).parent / "hermes.jinja"


class Renderer:
    """The prompts that the engine makes of requests."""

    def __init__(self, server: Vllm, http: httpx.Client) -> None:
        self.server = server
        self._http = http

    def rendered(self, kind: RequestKind, body: dict[str, Any] | bytes) -> tuple[int, ...] | None:
        """Token ids; None where the engine refuses the request."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ids("token_ids", RENDER_PATHS[kind], raw)

    def tokenized(self, body: bytes) -> tuple[int, ...] | None:
        """Return the same of a body for `/tokenize`."""
        return self._ids("tokens", "/tokenize", body)

    def text(self, ids: tuple[int, ...] | None) -> str:
        """Decode ids for a person who looks at a failure."""
        if ids is None:
            return "(refused)"
        answer = self._http.post("/detokenize", json={"model": self.server.model.name, "tokens": ids})
        return str(answer.json()["prompt"])

    def _ids(self, field: str, path: str, raw: bytes) -> tuple[int, ...] | None:
        answer = self._http.post(path, content=raw, headers={"content-type": "application/json"})
        return tuple(answer.json()[field]) if answer.status_code == 200 else None


@pytest.fixture(scope="module")
def engine(saw: Saw) -> Iterator[Renderer]:
    needs_memory(gib=4)
    saw("starting a vLLM server with --enable-scale-out")
    server = Vllm("agents", TINY, core=0, further=["--enable-scale-out", "--chat-template", str(TEMPLATE)])
    with vllm.running([server]), httpx.Client(base_url=server.url, timeout=30) as http:
        warm_up(server)
        yield Renderer(server, http)
