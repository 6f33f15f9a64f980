"""For apps that carry requests themselves: where each should go, and what became of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import msgspec

from kvproxy.app import ConfigLike, Proxy
from kvproxy.base.types import EndpointId
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.embed.lives import Life, Lives
from kvproxy.embed.no_endpoint import NoEndpoint, endpoint_ids
from kvproxy.operate.placing.carried import CarriedRequest, Placer
from kvproxy.operate.placing.external import engine_headers
from kvproxy.proxy.request.error_reply import LocalReply

_CHAT = "/v1/chat/completions"
_CLUSTER = "default"
#: Lease of a request whose end is never reported.
_LEASE_S = 3600.0
_SESSION = b"x-session-id"
#: Reason label of failures reported by the app.
_REPORTED = "reported"


class Router:
    """Places requests as the proxy would: by what endpoints hold of the prompt and by their load, in the router queue,
    with everything it learns.

        async with Router(endpoints={"a": "http://a:8000", "b": "http://b:8000"}) as router:
            async with router.place(body) as placed:
                answer = await post(placed.url, placed.body, placed.headers)
                placed.finish(answer["usage"])

    `config` and `endpoints` are as for AsyncTransport. It runs between `async with`, or from its first request on.
    """

    def __init__(self, config: ConfigLike | Proxy | None = None, *, endpoints: Mapping[str, str] | None = None) -> None:
        self._lives = Lives(config, endpoints)
        self._placers: WeakKeyDictionary[Life, Placer] = WeakKeyDictionary()

    @property
    def proxy(self) -> Proxy:
        """The proxy behind it, in the running event loop: metrics, clusters."""
        return self._lives.of_running_loop().proxy

    async def __aenter__(self) -> Self:
        life = self._lives.of_running_loop()
        if not life.started:
            await life.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._lives.end()

    def add_endpoint(self, name: str, url: str, *, cluster: str = "", **settings: Any) -> None:
        """Add an endpoint while it runs, as of Proxy."""
        self.proxy.add_endpoint(name, url, cluster=cluster, **settings)

    def remove_endpoint(self, name: str, *, cluster: str = _CLUSTER) -> None:
        """Place no further requests there; it finishes those it has. Raises LookupError for no such cluster."""
        self.proxy.clusters[cluster].operator.remove_endpoint(EndpointId(name))

    def place(
        self,
        body: bytes | Mapping[str, Any],
        *,
        path: str = _CHAT,
        session: str = "",
        tenant: str = "",
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        exclude: Collection[str] = (),
        sees_first_token: bool = True,
    ) -> PlacedRequest:
        """Return a context manager that places the request and holds its place until it is over.

        `body` is what the engine will be sent at `path`, as bytes or as data. `session` names the conversation;
        `tenant` is who asked, for fair turns in the queue, which requests of larger `priority` (-100 to 100) leave
        first; `headers` are the client's, of which those that name sessions and a priority are read. It goes to no
        endpoint in `exclude`, ids or one id. `sees_first_token`: False for a caller that cannot report the first token
        of a stream. Entering it raises NoEndpoint.
        """
        content = msgspec.json.encode(body) if isinstance(body, Mapping) else bytes(body)
        fields = [(_encoded(name.lower()), _encoded(value)) for name, value in (headers or {}).items()]
        if session:
            fields.append((_SESSION, _encoded(session)))
        barred = endpoint_ids(exclude)
        return PlacedRequest(
            self, content, path, fields, tenant, barred, priority=priority, sees_first_token=sees_first_token
        )

    async def _placer(self) -> Placer:
        life = self._lives.of_running_loop()
        if not life.started:
            await life.start()
        placer = self._placers.get(life)
        if placer is None:
            placer = Placer(life.proxy, lease_s=_LEASE_S, fallbacks=0, queue="router")
            self._placers[life] = placer
        return placer


class PlacedRequest:
    """One request, at the endpoint it should go to. It counts there until it is over.

    `body` is what to send: as given, with the engine's name for the model if a route has another. Leaving without
    `finish` or `failed` reports nothing about the engine.
    """

    def __init__(
        self,
        router: Router,
        body: bytes,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        tenant: str,
        exclude: frozenset[EndpointId],
        *,
        priority: int,
        sees_first_token: bool,
    ) -> None:
        self._router = router
        self._path = path
        self._headers = list(headers)
        self._tenant = tenant
        self._priority = priority
        self._exclude = exclude
        self._sees_first_token = sees_first_token
        self._entered: CarriedRequest | None = None
        self.body = body
        self._over = False

    async def __aenter__(self) -> Self:
        if self._entered is not None:
            raise RuntimeError("a request is placed once; call router.place() for the next one")
        placer = await self._router._placer()
        carried = placer.begin("POST", self._path, self._headers)
        carried.exchange.tenant = self._tenant
        carried.priority = self._priority
        try:
            replaced = await carried.place(self.body, exclude=self._exclude, sees_answer=self._sees_first_token)
        except LocalReply as why:
            carried.refused(why)
            raise NoEndpoint(why) from None
        except BaseException:
            carried.left()
            raise
        self._entered = carried
        self.body = self.body if replaced is None else replaced
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.leave()

    @property
    def _carried(self) -> CarriedRequest:
        if self._entered is None:
            raise RuntimeError("this request has no place yet: write `async with router.place(...) as placed`")
        return self._entered

    @property
    def endpoint(self) -> EndpointId:
        """Where to send it, by id."""
        return self._carried.listed[0].id

    @property
    def url(self) -> str:
        """Where to send it: the endpoint's URL with the request's path."""
        return f"{self._carried.listed[0].origin}{self._path}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers the request needs at its endpoint: the type of its body, the data-parallel rank, if one was chosen,
        and an id that no client chose, where engines have a fault that needs one."""
        return {"content-type": "application/json", **engine_headers(self._carried.exchange, self._carried.listed[0])}

    @property
    def predicted_cached_tokens(self) -> int:
        """Tokens of its prompt that are estimated to be cached there."""
        facts = self._carried.exchange.facts
        return 0 if facts is None else facts.matched_tokens(self.endpoint)

    def first_token(self) -> None:
        """Record the first piece of a streamed answer; called once."""
        if self._carried.exchange.outcome.ttft_s is None:
            self._carried.first_byte(self._carried.placer.clock())

    def finish(self, usage: Any = None, *, status: int = 200) -> None:
        """Record the complete answer. `usage` is its `usage` object, as data or as of the openai package; without it
        the reuse of the cache is not learned. `status` is the engine's: 4xx is the client's mistake, 5xx the
        engine's."""
        if self._over:
            return
        self._over = True
        outcome = self._carried.exchange.outcome
        outcome.status = status
        outcome.end = "completed"
        outcome.prompt_tokens = _count(usage, "prompt_tokens")
        outcome.completion_tokens = _count(usage, "completion_tokens")
        outcome.cached_tokens = _count(_field(usage, "prompt_tokens_details"), "cached_tokens")
        self._carried.answered(None)

    def failed(self, error: BaseException | None = None) -> None:
        """Record that the engine could not be reached, or broke off. Leave, or call `again` for another endpoint."""
        carried = self._carried
        if self._over or carried.held is None:
            return
        carried.exchange.outcome.end = "upstream_died"
        carried.held.pick.endpoint.metrics.attempt_failure(_REPORTED)
        carried.settle(AttemptOutcome.FAILURE)

    def move_to(self, name: str) -> None:
        """Follow a request that went to this endpoint instead, if the endpoint may take it."""
        carried = self._carried
        if self._over or carried.held is None or carried.held.pick.endpoint.id == name:
            return
        cluster = carried.held.cluster
        carried.settle(AttemptOutcome.CANCELLED)
        for endpoint in cluster.members.find_named(EndpointId(name)):
            carried.move_to(endpoint, carried.placer.clock())
            carried.listed = [endpoint]
            return

    def leave(self) -> None:
        """Give the place back: nothing is reported about the engine. A request that failed and went nowhere else ends
        as failed."""
        if self._over:
            return
        self._over = True
        if self._carried.held is None:
            self._carried.finish(self._carried.placer.clock())
        else:
            self._carried.left()

    async def again(self) -> EndpointId:
        """Return another endpoint, after a failure. Raises NoEndpoint if every one was tried."""
        if self._over:
            raise RuntimeError("this request is over; report a failure by failed() instead of finish()")
        self.failed()
        try:
            await self._carried.place_again()
        except LocalReply as why:
            raise NoEndpoint(why) from None
        self._carried.exchange.outcome.end = ""
        return self.endpoint


def _encoded(text: str) -> bytes:
    """Return a header's bytes: those that ASGI frameworks decoded as latin-1, or UTF-8 of other text."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _field(data: Any, name: str) -> Any:
    return data.get(name) if isinstance(data, Mapping) else getattr(data, name, None)


def _count(data: Any, name: str) -> int | None:
    value = _field(data, name)
    return value if isinstance(value, int) else None
