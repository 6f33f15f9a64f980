"""A Kubernetes API that others made for their tests (kmock), and the official client, which does as each line of
standard input says and prints the answer. Runs without kvproxy."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import kmock
from kubernetes import client


def call(core: client.CoreV1Api, line: str) -> Any:
    """Return what the official client has for one line, a JSON list of a verb and its argument."""
    verb, argument = json.loads(line)
    if verb == "create":
        return core.create_namespaced_pod("models", argument).metadata.name
    if verb == "patch":
        return core.patch_namespaced_pod(argument["metadata"]["name"], "models", argument).metadata.name
    if verb == "delete":
        return core.delete_namespaced_pod(argument, "models").metadata.name
    return sorted(pod.metadata.name for pod in core.list_namespaced_pod("models").items)


async def main() -> None:
    """Serve until standard input ends."""
    async with kmock.KubernetesEmulator() as api, kmock.Server(api) as server:
        print(server.url, flush=True)  # noqa: T201
        configuration = client.Configuration()
        configuration.host = str(server.url).rstrip("/")
        core = client.CoreV1Api(client.ApiClient(configuration))
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await asyncio.to_thread(call, core, line)), flush=True)  # noqa: T201


asyncio.run(main())
