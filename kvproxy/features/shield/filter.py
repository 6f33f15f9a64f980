"""Filter `shield`: stands right before the router, where `shield` in the configuration is `warn` or `refuse`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from starlette.types import ASGIApp, Message

from kvproxy.base.json_scan import NotAnObject, Unreadable, find_members, run_in_turns
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.cache.engines import Engines
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routes import RouteTarget
from kvproxy.features.shield.fields import FORMATS, TELLING, WATCHED, PlainValues, find_rules
from kvproxy.features.shield.metrics import ShieldMetrics
from kvproxy.features.shield.rules import ADVISORIES, Rule, open_rules
from kvproxy.features.shield.versions import TIMEOUT_S, EngineVersions
from kvproxy.proxy.filter_settings import RouterSettings
from kvproxy.proxy.filters.chain import FilterContext, FilterType, Services
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.forward.body_guard import beside_messages, read_names
from kvproxy.proxy.request.body import BodyReader, ClientLeft
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange, RandomHex

log = logging.getLogger("kvproxy.shield")

_SCORING = ("/score", "/rerank")
_WITH_BODIES = frozenset({"POST", "PUT", "PATCH"})
_ID_HEADER = b"x-request-id"
_TRUSTED_ONLY = frozenset({Rule.KV_TRANSFER_PARAMS})  # from others the field is cut out
_BY_HEADER = frozenset({Rule.CLIENT_REQUEST_ID})
#: Of an object in another encoding; a longer one counts as unreadable.
_RECODED_BYTES = 1024 * 1024


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}


class ShieldFilter(Step):
    """Keeps requests away from engines that they would harm, by the faults of the engines' versions."""

    reads_state = False

    def __init__(
        self,
        app: ASGIApp,
        *,
        refuses: bool,
        trusts_all: bool,
        versions: EngineVersions,
        services: Services,
        reader: BodyReader,
        metrics: Metrics,
        clock: Clock,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._refuses = refuses
        self._trusts_all = trusts_all
        self._versions = versions
        self._services = services
        self._reader = reader
        self._pace = asyncio.Lock()
        self._make_id = partial(RandomHex().take, 32) if make_id is None else make_id
        self._counts = metrics.group(ShieldMetrics)
        self._logged: set[tuple[str, Rule]] = set()
        self._plain = PlainValues()

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None] | None:
        """Wait only for a body that was not read yet, or that holds a member which some engine may not bear."""
        rules = self._versions.rules
        scope = downstream.scope
        if not rules or scope["method"] not in _WITH_BODIES:
            return None
        if Rule.CLIENT_REQUEST_ID in rules and _is_scoring(scope["path"]):
            self._replace_id(exchange, downstream)
        body = exchange.body
        if body is not None and self._is_harmless(body, exchange):
            return None
        if not (exchange.trusted or self._trusts_all):
            rules -= _TRUSTED_ONLY
        if rules <= _BY_HEADER:
            return None
        if body is None:
            return None if _is_form(scope["headers"]) else self._read(exchange, downstream, rules)
        return self._examine(exchange, scope["path"], body, rules)

    def _replace_id(self, exchange: Exchange, downstream: Downstream) -> None:
        """Engines key what belongs to a request by its id: the client's own could be another client's too."""
        headers: Headers = downstream.scope["headers"]
        given = next((value for name, value in headers if name == _ID_HEADER), b"")
        exchange.upstream_id = fresh = self._make_id()
        exchange.request_id = exchange.request_id or given.decode("latin-1") or fresh
        kept = [pair for pair in headers if pair[0] != _ID_HEADER]
        downstream.scope["headers"] = [*kept, (_ID_HEADER, fresh.encode())]
        downstream.hooks = (_give_own_id, *downstream.hooks)
        self._counts.requests.labels(Rule.CLIENT_REQUEST_ID.value, "rewritten").inc()

    def reads_bodies(self, method: str) -> bool:
        """As of RequestGuard."""
        return method in _WITH_BODIES and not self._versions.rules <= _BY_HEADER

    async def examine(self, exchange: Exchange, path: str, headers: Headers, body: bytes | None) -> None:
        """As of RequestGuard. All rules apply: nothing is cut out of what other programs carry."""
        rules = self._versions.rules
        if Rule.CLIENT_REQUEST_ID in rules and _is_scoring(path):
            exchange.upstream_id = self._make_id()
            self._counts.requests.labels(Rule.CLIENT_REQUEST_ID.value, "rewritten").inc()
        if body and not rules <= _BY_HEADER and not self._is_harmless(body, exchange) and not _is_form(headers):
            await self._examine(exchange, path, body, rules)

    async def _read(self, exchange: Exchange, downstream: Downstream, rules: frozenset[Rule]) -> None:
        declared = next((value for name, value in downstream.scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and len(declared) < 20:
            self._reader.check_length(int(declared))
        body = downstream.take_body()
        if body is None:
            try:
                body = await self._reader.read(downstream.receive)
            except ClientLeft:
                downstream.wrap_receive(lambda _: _disconnected)  # the router counts its end
                return
        else:
            self._reader.accept_body(body)
        exchange.body = downstream.replayed = body
        exchange.held_bytes += len(body)
        exchange.release = self._reader.release
        if not self._is_harmless(body, exchange):
            await self._examine(exchange, downstream.scope["path"], body, rules)

    async def _examine(self, exchange: Exchange, path: str, body: bytes, rules: frozenset[Rule]) -> None:
        found = await self._find(exchange, body, path)
        if Rule.UNREADABLE not in found:
            found &= rules
        if found:
            await self._act(exchange, path, found, rules)

    async def _find(self, exchange: Exchange, body: bytes, path: str) -> set[Rule]:
        text = body
        known = exchange.members
        try:
            if known is None:
                text = _in_utf8(body)
                if text is body and b"_transfer_params" not in body:  # which is examined beside the prompt
                    text = beside_messages(body, exchange)
                known = await run_in_turns(find_members(text, WATCHED.__contains__), self._pace)
        except NotAnObject:
            return set()
        except Unreadable:
            return {Rule.UNREADABLE}
        members = [(one.name, text[one.value.start : one.value.end]) for one in known.found]
        return find_rules(members, path)

    async def _act(self, exchange: Exchange, path: str, found: set[Rule], rules: frozenset[Rule]) -> None:
        model = exchange.inference.model if exchange.inference else ""
        target = self._services.routes.resolve(path, model)
        if target is None:
            return  # the router answers
        serving = _serving(target, model)
        if self._refuses:
            await self._versions.ask_engines({one.engine for one in serving if one.engine.software is None})
        feared = rules if Rule.UNREADABLE in found else found
        affected = [one for one in serving if one.engine.software and feared & open_rules(one.engine.software)]
        if not affected:
            return
        met = {rule for one in affected for rule in feared & open_rules(one.engine.software)}
        named = {Rule.UNREADABLE} if Rule.UNREADABLE in found else met
        others = [one for one in serving if one not in affected]
        action = "passed" if not self._refuses else "rerouted" if others else "refused"
        self._count(target.cluster.name, named, action)
        if action == "refused":
            raise LocalReply(400, "shield", _refusal(named))
        if action == "rerouted":
            safe = [one for one in others if one.engine.software]
            exchange.barred = frozenset(one.id for one in serving if one not in (safe or others))

    def _is_harmless(self, body: bytes, exchange: Exchange) -> bool:
        """Return True if no member of the body matters, as for nearly every body."""
        if exchange.members is not None:
            return TELLING.isdisjoint(one.name for one in exchange.members.found)
        names = read_names(body, exchange)
        if names is None:
            return not body
        if TELLING.isdisjoint(names):
            return True
        telling = TELLING & names.keys()
        return telling <= FORMATS and not any(self._plain.has_pattern(bytes(names[name])) for name in telling)

    def _count(self, cluster: str, rules: Iterable[Rule], action: str) -> None:
        for rule in sorted(rules):
            self._counts.requests.labels(rule.value, action).inc()
            if (cluster, rule) not in self._logged:
                self._logged.add((cluster, rule))
                harm = ADVISORIES[rule].harm if rule in ADVISORIES else "it cannot be checked"
                log.warning(
                    "[shield] %s: a request was %s that an engine has a fault for: %s (%s)",
                    cluster,
                    action,
                    rule.value,
                    harm,
                )


def _is_scoring(path: str) -> bool:
    return path.rstrip("/").endswith(_SCORING)


def _give_own_id(exchange: Exchange, status: int, headers: Headers) -> None:
    """Restore the client's own id where an engine sends the one it was sent."""
    own = exchange.request_id.encode("latin-1")
    headers[:] = [(name, own if name == _ID_HEADER else value) for name, value in headers]


def _serving(target: RouteTarget, model: str) -> list[Endpoint]:
    served = target.upstream_model or model
    return [one for one in target.cluster.endpoints if one.serves(served)]


def _refusal(rules: Iterable[Rule]) -> str:
    """Without the engines' versions, which are no client's business."""
    fields = "; ".join(ADVISORIES[one].field if one in ADVISORIES else "the body" for one in sorted(rules))
    return f"This request could harm the engine that serves it and is refused (see: {fields})."


def _in_utf8(body: bytes) -> bytes:
    """Return the body itself, or the text of one in UTF-16 or UTF-32, as Python's parsers read it. Raises
    Unreadable."""
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    if len(body) > _RECODED_BYTES:
        raise Unreadable("too long in another encoding than UTF-8")
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return b""  # nor can an engine read it


def build(app: ASGIApp, settings: object, context: FilterContext, *, refuses: bool) -> ASGIApp:
    """Return the filter around `app`, which asks the engines of all clusters for their versions."""
    services = context.services
    limits = context.config.limits
    versions = EngineVersions(services.clusters, Engines(services.pool, timeout_s=TIMEOUT_S))
    context.lifetimes.append(versions)
    context.on_serving.append(partial(versions.bind_gauges, context.metrics.group(ShieldMetrics)))
    router = next((one.settings for one in context.config.filters if isinstance(one.settings, RouterSettings)), None)
    made = ShieldFilter(
        app,
        refuses=refuses,
        trusts_all=router is not None and router.trust_clients,
        versions=versions,
        services=services,
        reader=BodyReader(limit_bytes=limits.body, timeout_s=limits.body_timeout, held=services.bodies),
        metrics=context.metrics,
        clock=context.clock,
    )
    context.guards.append(made)
    return made


def make_filter_type(*, refuses: bool) -> FilterType:
    """Return the kind of filter for one setting of `shield`."""
    return FilterType(None, partial(build, refuses=refuses))


def _is_form(headers: Headers) -> bool:
    """Return whether the body is a form: these are streamed to the engine, and so are not looked through."""
    return any(
        name == b"content-type" and value.strip().lower().startswith(b"multipart/form-data") for name, value in headers
    )
