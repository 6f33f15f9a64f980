"""The scale of a workload, which is raised from none to one pod."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvproxy.base.errors import Refused
from kvproxy.base.timed_thread import TimedThread
from kvproxy.features.kubernetes.settings import KubernetesDiscoverySettings
from kvproxy.features.kubernetes.source import find_access, find_namespace

_CALL_S = 5.0
_CONFLICT = 409


class _Spec(msgspec.Struct):
    replicas: int = 0  # absent for none


class _Scale(msgspec.Struct):
    spec: _Spec


class WorkloadScale:
    """A workload of Kubernetes; a call has it run one pod unless it runs some."""

    def __init__(self, settings: KubernetesDiscoverySettings, *, env: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._env = env
        self._files = TimedThread("Kubernetes credentials")

    async def __call__(self) -> None:
        """Raise ClientError or DiscoveryError where that fails."""
        settings = self._settings
        path = f"/apis/apps/v1/namespaces/{await find_namespace(settings, self._files)}/{settings.scale}/scale"
        async with find_access(settings, self._env).connect(self._files) as api:
            raw = await api.call("GET", path, timeout_s=_CALL_S)
            if api.decode(raw, _Scale, path).spec.replicas:
                return
            scale: dict[str, Any] = msgspec.json.decode(raw)
            scale["spec"]["replicas"] = 1
            try:  # of the version that was read: nothing is undone that another does meanwhile
                await api.call("PUT", path, body=msgspec.json.encode(scale), timeout_s=_CALL_S)
            except Refused as error:
                if error.status != _CONFLICT:
                    raise
