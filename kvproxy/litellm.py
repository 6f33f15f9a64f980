"""KV-aware choice of deployments for LiteLLM: `pip install kvproxy[litellm]`.

    litellm.callbacks = [KVCacheRouting()]

or, for LiteLLM's proxy, `litellm_settings: {callbacks: kvproxy.litellm.routing}`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cachetools import TTLCache
from litellm.integrations.custom_logger import CustomLogger

from kvproxy.embed.no_endpoint import NoEndpoint
from kvproxy.embed.router import PlacedRequest, Router

log = logging.getLogger("kvproxy")

Deployment = dict[str, Any]

#: Requests whose end was not reported yet, and for how long one is waited for.
_MAX_OPEN = 10_000
_OPEN_S = 3600.0
#: Between two looks at streams whose first token is awaited: LiteLLM notes its time, and calls nobody.
_LOOK_S = 0.02
#: Members of a call that are the prompt, or shape it, and the path that has them.
_PROMPT = ("messages", "prompt", "input", "tools", "stream", "max_tokens", "chat_template_kwargs")
#: In a call's metadata: its place, and deployments that failed it.
_KEY = "kvproxy_place"
_TRIED = "kvproxy_tried"
_HOSTED = ("hosted_vllm/", "openai/", "vllm/", "text-completion-openai/")


class _PlaceName(str):
    """Names a request's place in the metadata of its call. LiteLLM keeps both as long as the call, of whose end by
    cancellation, or by a stream left early, it reports nothing."""

    notes: Mapping[str, Any] = MappingProxyType({})  # LiteLLM's, on a stream


class KVCacheRouting(CustomLogger):
    """Keeps, of the deployments that LiteLLM would choose from, the one where the request costs least.

    LiteLLM's cool-downs, fallbacks and retries stay as they are: what it has left out is not chosen. Deployments
    without an `api_base`, and calls without a prompt, are left to LiteLLM. `settings` are a configuration without
    endpoints. Asynchronous calls only (`acompletion`): LiteLLM asks no callback for others.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._settings = dict(settings or {})
        self._router: Router | None = None
        self._urls: dict[str, str] = {}
        self._open: TTLCache[str, PlacedRequest] = TTLCache(_MAX_OPEN, _OPEN_S)
        self._streams: weakref.WeakSet[_PlaceName] = weakref.WeakSet()  # without a first token yet
        self._watch: asyncio.Task[None] | None = None

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Deployment],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[Deployment]:
        """Return the deployment to take, alone, as LiteLLM expects. Never raises: all of them if none can be chosen."""
        by_id = {_id_of(one): one for one in healthy_deployments if isinstance(one, dict) and _url_of(one)}
        if len(by_id) < len(healthy_deployments) or len(by_id) < 2:
            return healthy_deployments
        call = dict(request_kwargs or {})
        if messages is not None:
            call["messages"] = messages
        try:
            placed = await self._place(call, by_id)
        except NoEndpoint:
            return healthy_deployments
        except Exception:
            log.exception("no deployment was chosen by its cache")
            return healthy_deployments
        return [by_id[placed.endpoint]]

    def log_pre_api_call(self, model: str, messages: Any, kwargs: Mapping[str, Any]) -> None:
        """Keep LiteLLM's notes on a stream, in which the time of its first token will be. Called in any thread."""
        name = _metadata_of(kwargs.get("litellm_params") or {}).get(_KEY)
        if isinstance(name, _PlaceName):
            name.notes = kwargs

    async def async_log_success_event(self, kwargs: Mapping[str, Any], response_obj: Any, *args: Any, **_: Any) -> None:
        """As of LiteLLM: the answer, or a whole stream of it, and its usage."""
        placed = self._ended(kwargs)
        if placed is not None:
            placed.finish(getattr(response_obj, "usage", None))
            await placed.__aexit__(None, None, None)

    async def async_log_failure_event(self, kwargs: Mapping[str, Any], *args: Any, **_: Any) -> None:
        """As of LiteLLM: an error of the deployment, or of the request."""
        placed = self._ended(kwargs)
        if placed is None:
            return
        _metadata_of(kwargs.get("litellm_params") or {}).setdefault(_TRIED, []).append(str(placed.endpoint))
        status = getattr(kwargs.get("exception"), "status_code", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
            placed.finish(status=status)
        else:
            placed.failed()
        await placed.__aexit__(None, None, None)

    def _await_first_token(self, name: _PlaceName) -> None:
        self._streams.add(name)
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._watch_streams(), name="first tokens of LiteLLM")

    async def _watch_streams(self) -> None:
        while self._streams:
            await asyncio.sleep(_LOOK_S)
            for name in list(self._streams):
                placed = self._open.get(name)
                if placed is None or name.notes.get("completion_start_time") is not None:
                    self._streams.discard(name)
                if placed is not None and name not in self._streams:
                    placed.first_token()
            name = placed = None  # type: ignore[assignment] # which would keep a call that nobody else has

    def _drop(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Give the place of a dropped call back, unless its end was reported. Called in any thread."""
        if name in self._open and not loop.is_closed():
            loop.call_soon_threadsafe(self._leave, name)

    def _leave(self, name: str) -> None:
        placed = self._open.pop(name, None)
        if placed is not None:
            placed.leave()

    async def _place(self, call: Mapping[str, Any], deployments: Mapping[str, Deployment]) -> PlacedRequest:
        router = await self._router_for(deployments)
        body = {name: call[name] for name in _PROMPT if call.get(name) is not None}
        body["model"] = _model_of(next(iter(deployments.values())))
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if "input" in body:
            path = "/v1/embeddings"
        metadata = _metadata_of(call)
        earlier = self._open.pop(metadata.get(_KEY, ""), None)
        tried = set(metadata.get(_TRIED, ()))
        if earlier is not None:  # an attempt that failed: LiteLLM tries another deployment
            earlier.failed()
            earlier.leave()
            tried.add(str(earlier.endpoint))
        others = deployments.keys() - tried or deployments.keys()
        placed = router.place(
            body,
            path=path,
            session=str(call.get("litellm_session_id") or metadata.get("session_id") or ""),
            tenant=str(metadata.get("user_api_key_hash") or ""),
            exclude=self._urls.keys() - others,
        )
        await placed.__aenter__()
        metadata[_KEY] = name = _PlaceName(uuid.uuid4().hex)
        metadata[_TRIED] = sorted(tried)
        self._open[str(name)] = placed
        weakref.finalize(name, self._drop, str(name), asyncio.get_running_loop()).atexit = False
        if call.get("stream"):
            self._await_first_token(name)
        return placed

    async def _router_for(self, deployments: Mapping[str, Deployment]) -> Router:
        router = self._router
        urls = {name: _url_of(one) for name, one in deployments.items()}
        if router is None:
            self._urls = urls
            router = self._router = Router({"health": {"active": False}, **self._settings, "endpoints": urls})
            await router.__aenter__()
        for name, url in urls.items():
            if self._urls.get(name) != url:
                router.remove_endpoint(name)
                router.add_endpoint(name, url)
                self._urls[name] = url
        return router

    def _ended(self, kwargs: Mapping[str, Any]) -> PlacedRequest | None:
        name = _metadata_of(kwargs.get("litellm_params") or {}).get(_KEY, "")
        placed: PlacedRequest | None = self._open.pop(name, None)
        return placed


def _metadata_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary that LiteLLM hands on from the choice of a deployment to the end of its answer."""
    for name in ("litellm_metadata", "metadata"):
        if isinstance(found := call.get(name), dict):
            return found
    return {}


def _id_of(deployment: Deployment) -> str:
    return str(deployment.get("model_info", {}).get("id", ""))


def _url_of(deployment: Deployment) -> str:
    base = str(deployment.get("litellm_params", {}).get("api_base") or "")
    return base.rstrip("/").removesuffix("/v1")


def _model_of(deployment: Deployment) -> str:
    name = str(deployment.get("litellm_params", {}).get("model", ""))
    return next((name.removeprefix(prefix) for prefix in _HOSTED if name.startswith(prefix)), name)


#: For LiteLLM's configuration files, which name an object.
routing = KVCacheRouting()
