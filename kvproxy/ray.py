"""KV-aware request router for Ray Serve: `pip install kvproxy[ray]`.

    @serve.deployment(request_router_config=RequestRouterConfig(request_router_class="kvproxy.ray:KVCacheRouter"))

For Ray Serve LLM: `LLMConfig(deployment_config={"request_router_config": {...}})`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import ray.util.client
from ray.serve.request_router import MultiplexMixin, PendingRequest, RequestRouter, RunningReplica
from xxhash import xxh3_64_hexdigest

from kvproxy.embed.no_endpoint import NoEndpoint
from kvproxy.embed.router import PlacedRequest, Router

log = logging.getLogger("kvproxy")

#: Requests whose end Ray did not report yet.
_MAX_OPEN = 10_000
#: How long a request counts whose end Ray does not report: with direct streaming it asks for a replica, no more.
_PICKED_S = 10.0
_SETTINGS = {
    "health": {"active": False},
    "queue": {"enabled": False},  # Ray has one
}
#: Places where ingress replicas may meet.
_STORES = frozenset({"redis", "nats", "ray"})
_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
#: Prompt of Ray Serve LLM, tokenized.
_TOKEN_IDS = "request_token_ids"


class KVCacheRouter(MultiplexMixin, RequestRouter):
    """Router of Ray Serve by the prefixes sent to replicas and by their load.

    A request's prompt is its first argument that has `messages`, `prompt` or `input`: a mapping, or an object of Ray
    Serve LLM. Others go by the shortest queue. With `request_router_kwargs={"settings": {...}}` a configuration of the
    policy. Ingress replicas decide by what all of them placed: they meet at an actor, or at a store by `sync` in the
    settings; with `{"sync": {}}` each goes by its own requests. Of a replica whose `record_routing_stats` returns its
    engine's `engine_url`, and of those of Ray Serve LLM with direct streaming, it follows KV events and metrics.
    """

    def initialize_state(self, settings: Mapping[str, Any] | None = None, **_: Any) -> None:
        """As of Ray Serve."""
        self._settings = {**_SETTINGS, **(settings or {})}
        sync = self._settings.get("sync")
        if sync is None or (sync and _STORES.isdisjoint(sync)):
            sync = {**_meet_in_ray(self._deployment_id), **(sync or {})}
        if sync:
            self._settings["sync"] = {"replica": f"{socket.gethostname()}-{uuid.uuid4().hex}", **sync}
        self._router: Router | None = None
        self._ending: asyncio.Task[None] | None = None  # of the router before
        self._known: dict[str, dict[str, Any]] = {}
        self._changed = True  # replicas, or what is known of them
        self._open: dict[str, PlacedRequest] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """As of Ray Serve: the replica to take, then the others."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again at once while all are full
        body = _body_of(pending_request)
        if body is None:
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
        if placed is None:
            return
        placed.move_to(replica_id.unique_id)
        if pending_request.metadata.is_streaming:
            _await_first_piece(result, placed)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """As of Ray Serve: the answer is over, well or not; or this replica had no room."""
        placed = self._open.get(internal_request_id)
        if placed is None or placed.endpoint != replica_id.unique_id:
            return
        del self._open[internal_request_id]
        if replica_id.unique_id in self._known:
            placed.finish()
        else:
            placed.leave()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As of Ray Serve."""
        self._changed = True
        super().update_replicas(replicas)
        if not replicas and self._router is not None:  # the app was deleted, which Ray does not report, or sleeps
            router, self._router = self._router, None
            self._known = {}
            self._ending = self._event_loop.create_task(router.__aexit__(), name="kvproxy ends")

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """As of Ray Serve."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    async def _place(
        self, body: Mapping[str, Any], pending: PendingRequest, candidates: list[RunningReplica]
    ) -> PlacedRequest:
        metadata = pending.metadata
        allowed = {one.replica_id.unique_id: one for one in candidates}
        router = self._router
        if router is None or self._changed:
            router = await self._follow_replicas(candidates)
        model = metadata.multiplexed_model_id
        having = {name for name, one in allowed.items() if model and model in one.multiplexed_model_ids}
        earlier = self._open.pop(metadata.internal_request_id, None)
        if earlier is not None:  # no replica took it: Ray asks again
            earlier.leave()
        placed = router.place(
            {**body, "model": model} if model else body,
            path=next(path for name, path in _PATHS.items() if name in body),
            session=str(getattr(metadata, "session_id", "") or ""),
            exclude=self._known.keys() - (having or allowed.keys()),
            sees_first_token=metadata.is_streaming,
        )
        await placed.__aenter__()
        placed.body = b""  # the replica gets it from Ray
        self._open[metadata.internal_request_id] = placed
        if len(self._open) > _MAX_OPEN:
            self._leave(next(iter(self._open)))
        if metadata.internal_request_id in self._pending_requests_by_id:
            pending.future.add_done_callback(lambda future: self._given_up(future, metadata.internal_request_id))
        else:
            asyncio.get_running_loop().call_later(_PICKED_S, self._leave, metadata.internal_request_id)
        return placed

    def _given_up(self, future: asyncio.Future[Any], request: str) -> None:
        if future.cancelled():
            self._leave(request)

    def _leave(self, request: str) -> None:
        placed = self._open.pop(request, None)
        if placed is not None:
            placed.leave()

    async def _follow_replicas(self, candidates: list[RunningReplica]) -> Router:
        """Return the router, with all replicas as its endpoints."""
        if self._ending is not None:
            await asyncio.wait([self._ending])  # both would be one replica to the others
            self._ending = None
        self._changed = False
        found = {one.replica_id.unique_id: _engine_of(one) for one in (*self._replicas_list, *candidates)}
        router = self._router
        if router is None:
            endpoints = [{"id": name, **engine} for name, engine in found.items()]
            router = self._router = Router({**self._settings, "endpoints": endpoints})
            self._known = found
            await router.__aenter__()
            if self._router is not router:
                raise RuntimeError("all replicas left while the first request came")
        for name, engine in found.items():
            if self._known.get(name) != engine:
                router.add_endpoint(name, **engine)
                self._known[name] = engine
        for name in self._known.keys() - found.keys():
            self._forget(name)
        return router

    def _forget(self, name: str) -> None:
        if self._router is not None and self._known.pop(name, None) is not None:
            self._router.remove_endpoint(name)


def _meet_in_ray(deployment: Any) -> dict[str, str]:
    """Return where the ingress replicas of a deployment find each other; nothing for a driver over Ray Client, whose
    connection breaks when a call is given up."""
    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return {}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"kvproxy-{deployment.app_name}-{deployment.name}")
    return {"ray": f"{name[:111]}-{xxh3_64_hexdigest(repr(deployment).encode())}"}


def _engine_of(replica: RunningReplica) -> dict[str, Any]:
    """Return the settings of a replica as an endpoint: where its engine answers, and publishes KV events."""
    stats = replica.routing_stats or {}
    events = stats.get("kv_event_metadata") or {}
    sources = {name: events[name] for name in ("endpoint", "replay_endpoint") if events.get(name)}
    served = replica.backend_http_endpoint
    unreachable = f"http://127.0.0.1:1/{replica.replica_id.unique_id}"
    url = stats.get("engine_url") or (unreachable if served is None else f"http://{served[0]}:{served[1]}")
    return {"url": url, "kv_event_sources": sources} if sources else {"url": url}


def _await_first_piece(result: Any, placed: PlacedRequest) -> None:
    """Report the first piece of a stream when Ray's response generator takes it, which it does by this member."""
    loop = asyncio.get_running_loop()
    take = result.__anext__

    async def take_first() -> Any:
        result.__dict__.pop("__anext__", None)
        piece = await take()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(placed.first_token)
        return piece

    result.__anext__ = take_first


def _body_of(pending: PendingRequest) -> Mapping[str, Any] | None:
    """Return the request's body; None if it has no prompt."""
    streams = pending.metadata.is_streaming
    if token_ids := pending.kwargs.get(_TOKEN_IDS):
        return {"model": "", "prompt": token_ids, "stream": streams}
    for given in (*pending.args, *pending.kwargs.values()):
        data = _data_of(given)
        if data is not None and not data.keys().isdisjoint(_PATHS):
            return {"model": "", **data, "stream": streams and data.get("stream", True)}
    return None


def _data_of(given: Any) -> Mapping[str, Any] | None:
    """Return an argument as data, if it may be a body."""
    if isinstance(given, bytes | str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError:
            return None
    if isinstance(given, Mapping):
        return given
    if callable(dump := getattr(given, "model_dump", None)):
        dumped: Mapping[str, Any] = dump(mode="json", exclude_none=True)
        return dumped
    return vars(given) if any(hasattr(given, name) for name in _PATHS) else None
