"""Endpoints from a Kubernetes API that others made for their tests, changed and read by the official client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.followed import Follow, follow
from tests.services.install import KUBERNETES_FOLDER
from tests.support.until import until

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not (KUBERNETES_FOLDER / "kmock").is_dir(), reason="needs kmock (make test-services)"),
]
__all__ = ["follow"]

_PROGRAM = Path(__file__).parent / "inside" / "kubernetes_api.py"


class Api:
    """The API and its client, in a process of their own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process

    async def call(self, verb: str, argument: object = None) -> Any:
        """Return the answer of the official client."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, argument]).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


@asynccontextmanager
async def running() -> AsyncIterator[Api]:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(KUBERNETES_FOLDER)}
    process = await asyncio.create_subprocess_exec(sys.executable, _PROGRAM, stdin=pipe, stdout=pipe, env=environment)
    assert process.stdout is not None
    try:
        yield Api(process, (await process.stdout.readline()).decode().strip())
    finally:
        process.kill()
        await process.wait()


def pod(name: str, address: str, *, ready: bool = True) -> dict[str, Any]:
    """Return a pod that a custom resource owns."""
    ports = [{"name": "http", "containerPort": 8000}]
    owner = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "vllm", "uid": "1"}
    metadata = {"name": name, "namespace": "models", "labels": {"app": "vllm"}, "ownerReferences": [owner]}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "vllm", "ports": ports}]},
        "status": {
            "podIP": address,
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


async def test_pods_that_the_official_client_creates_changes_and_deletes(follow: Follow) -> None:
    """Straight, the client lists the same ones. Neither an odd address nor a missing version stops others."""
    async with running() as api:
        for number, name in enumerate("ab"):
            await api.call("create", pod(name, f"10.0.0.{number}"))
        access = {"selector": "app=vllm", "namespace": "models", "api": {"url": api.url}}
        async with follow(kubernetes=access) as one:
            await until(lambda: one.urls == {"a": "http://10.0.0.0:8000", "b": "http://10.0.0.1:8000"})
            await api.call("patch", pod("a", "10.0.0.0", ready=False))
            await until(lambda: one.conditions == {"a": "not_ready", "b": "up"})
            await api.call("create", pod("odd", "user:pw@127.0.0.1"))
            await api.call("create", pod("c", "10.0.0.2"))
            await until(lambda: set(one.urls) == {"a", "b", "c"})
            assert await api.call("list") == ["a", "b", "c", "odd"]
            await api.call("delete", "odd")
            await api.call("delete", "a")
            await until(lambda: set(one.urls) == {"b", "c"})
            assert await api.call("list") == ["b", "c"]
            assert one.failing == 0
