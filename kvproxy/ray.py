"""KV-aware request router for Ray Serve: `pip install kvproxy[ray]`.

    @serve.deployment(request_router_config=RequestRouterConfig(request_router_class="kvproxy.ray:KVCacheRouter"))

For Ray Serve LLM: `LLMConfig(deployment_config={"request_router_config": {...}})`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from cachetools import TTLCache
from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, RequestRouter, RunningReplica

from kvproxy.embed.no_endpoint import NoEndpoint
from kvproxy.embed.router import PlacedRequest, Router

log = logging.getLogger("kvproxy")

_MAX_OPEN = 10_000
_OPEN_S = 3600.0
#: No replica has an address that the router could ask: what it knows it learns from what it placed.
_NO_QUESTIONS = {
    "health": {"active": False},
    "queue": {"enabled": False},  # Ray has one
    "filters": {"kvcache": {"kv_events": False}},
}
_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}


class KVCacheRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """Router of Ray Serve by the prefixes sent to replicas and by their load.

    A request's prompt is its first argument that has `messages`, `prompt` or `input`: a mapping, or an object of Ray
    Serve LLM. Others go by the shortest queue. With `request_router_kwargs={"settings": {...}}` a configuration of the
    policy. Each ingress replica decides by what it placed itself, and by the queue lengths that Ray reports.
    """

    def initialize_state(self, settings: Mapping[str, Any] | None = None, **_: Any) -> None:
        """As of Ray Serve."""
        self._settings = {**_NO_QUESTIONS, **(settings or {})}
        self._router: Router | None = None
        self._known: set[str] = set()
        self._open: TTLCache[str, PlacedRequest] = TTLCache(_MAX_OPEN, _OPEN_S)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """As of Ray Serve: the replica to take, then the others."""
        body = None if pending_request is None else _body_of(pending_request)
        if body is None or pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        try:
            placed = await self._place(body, pending_request, candidate_replicas)
        except NoEndpoint:
            return [candidate_replicas]
        except Exception:
            log.exception("no replica was chosen by its cache")
            return [candidate_replicas]
        first = [one for one in candidate_replicas if one.replica_id.unique_id == placed.endpoint]
        return [first, [one for one in candidate_replicas if one not in first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """As of Ray Serve: the load follows where a request went elsewhere."""
        placed = self._open.get(pending_request.metadata.internal_request_id)
        if placed is not None:
            placed.move_to(replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """As of Ray Serve: the answer is over, well or not."""
        placed = self._open.pop(internal_request_id, None)
        if placed is not None:
            placed.finish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """As of Ray Serve."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    async def _place(
        self, body: Mapping[str, Any], pending: PendingRequest, candidates: list[RunningReplica]
    ) -> PlacedRequest:
        metadata = pending.metadata
        allowed = {one.replica_id.unique_id: one for one in candidates}
        router = await self._router_for(allowed.keys())
        model = getattr(metadata, "multiplexed_model_id", "")
        having = {name for name, one in allowed.items() if model and model in one.multiplexed_model_ids}
        earlier = self._open.pop(metadata.internal_request_id, None)
        if earlier is not None:  # no replica took it: Ray asks again
            earlier.leave()
        placed = router.place(
            body,
            path=next(path for name, path in _PATHS.items() if name in body),
            session=str(getattr(metadata, "session_id", "") or ""),
            exclude=self._known - (having or allowed.keys()),
            sees_first_token=False,
        )
        await placed.__aenter__()
        self._open[metadata.internal_request_id] = placed
        return placed

    async def _router_for(self, names: Any) -> Router:
        """Return the router, with these replicas as its endpoints besides those it had."""
        router = self._router
        if router is None:
            urls = {name: f"http://{name}.invalid" for name in names}
            router = self._router = Router({**self._settings, "endpoints": urls})
            self._known = set(urls)
            await router.__aenter__()
        for name in names - self._known:
            router.add_endpoint(name, f"http://{name}.invalid")
            self._known.add(name)
        for name in self._known - {each.unique_id for each in self._replica_id_set}:
            self._forget(name)
        return router

    def _forget(self, name: str) -> None:
        if self._router is not None and name in self._known:
            self._known.discard(name)
            self._router.remove_endpoint(name)


def _body_of(pending: PendingRequest) -> Mapping[str, Any] | None:
    """Return the request's body; None if it has no prompt."""
    for given in (*pending.args, *pending.kwargs.values()):
        dump = getattr(given, "model_dump", None)
        data = dump(mode="json", exclude_none=True) if callable(dump) else given
        if isinstance(data, bytes | str):
            try:
                data = msgspec.json.decode(data)
            except msgspec.DecodeError:
                continue
        if isinstance(data, Mapping) and not data.keys().isdisjoint(_PATHS):
            return {"model": "", **data}
    return None
