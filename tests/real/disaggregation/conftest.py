"""Two vLLMs that read each other's KV by NIXL over TCP: `p` is to prefill, `d` to decode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.conftest import Saw, needs_memory
from tests.real.engines.place import NIXL, TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair
from tests.support.ports import free_ports

_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def nixl_vllm(name: str, *, core: int, path: Path) -> Vllm:
    """Return an engine with the connector; `path` has what puts NIXL behind its own packages."""
    (side,) = free_ports(1)
    environment = {
        "PYTHONPATH": str(path),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
    }
    further = ("--kv-transfer-config", json.dumps(_CONNECTOR))
    return Vllm(name, TINY, core=core, blocks=1024, further=further, environment=environment)


@pytest.fixture(scope="module")
def two(saw: Saw, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both, running; `a` prefills and `b` decodes."""
    if not (NIXL / "nixl").exists():
        pytest.skip("NIXL is not installed; `make test-real` installs it")
    needs_memory(gib=7)
    path = tmp_path_factory.mktemp("nixl")
    (path / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(NIXL)!r})\n")
    saw("starting two vLLMs with NIXL (one to three minutes)")
    with running_pair(nixl_vllm("p", core=0, path=path), nixl_vllm("d", core=1, path=path)) as pair:
        yield pair
