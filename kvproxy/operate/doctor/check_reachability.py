"""Can each engine be reached, is it well, and is it an engine at all?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from kvproxy.base.errors import BadResponse, ClientError, ClientTimeout, ClientUnavailable, NotSupported, Refused
from kvproxy.base.types import Clock
from kvproxy.base.upstream.origin import Origin
from kvproxy.cache.clients.engine_metrics import EngineMetrics, parse_engine_metrics
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Check, Finding, check, ok, problem, warning
from kvproxy.operate.doctor.tools import ConnectResult, explain_failure

#: A certificate that expires sooner is worth a warning.
_SOON_S = 14 * 86400.0
_WRONG_PORT = "is it the engine's port? Correct the url"
#: A server that requires a certificate ends the connection once the handshake is over, often without its reason.
_SHOW_CERTIFICATE = (
    "if it requires clients' certificates (vLLM's `--ssl-cert-reqs 2`), set `cert_file` and `key_file` of the"
    " endpoint; else read the engine's log"
)
_KEY_STATUSES = (401, 403)
#: Status of nginx, kvproxy and others for plain http on a port that serves https.
_PLAIN_HTTP_STATUS = 400


def check_connection(
    where: str, origin: Origin, try_link: Callable[[], Awaitable[ConnectResult]], wall_clock: Clock
) -> Check:
    """Check one address: name, port, TLS."""

    async def collect() -> Sequence[Finding]:
        return [_judge_link(where, origin, await try_link(), wall_clock)]

    return Check("connection", where, 2, collect)


def _judge_link(where: str, origin: Origin, link: ConnectResult, wall_clock: Clock) -> Finding:
    if link.error is not None:
        return explain_failure(where, origin, link.error, connected=link.connected)
    ends = link.certificate_ends
    left_s = None if ends is None else (ends - datetime.fromtimestamp(wall_clock(), UTC)).total_seconds()
    if left_s is not None and left_s < _SOON_S:
        what = f"the certificate of {origin.host}:{origin.port} expires in {max(left_s, 0) / 86400:.1f} days"
        return warning(where, what, "renew the engine's certificate")
    return ok(where, f"reachable at {origin}")


@check("health", calls=4)
async def check_health(engine: EngineFacts) -> Sequence[Finding]:
    """Ask its health path, as the proxy probes it."""
    if not await engine.link.is_reachable():
        return []
    try:
        status = (await engine.link.health_reply()).status
    except ClientUnavailable as error:
        if await engine.link.speaks_tls():
            return [_speaks_tls(engine.where)]
        what = f"connects, but does not answer http: {error}"
        fix = "is it https, or another service's port? Correct the url"
        return [problem(engine.where, what, _SHOW_CERTIFICATE if engine.origin.scheme == "https" else fix)]
    if status == _PLAIN_HTTP_STATUS and await engine.link.speaks_tls():
        return [_speaks_tls(engine.where)]
    if 200 <= status < 300:
        return [ok(engine.where, "healthy")]
    if status in _KEY_STATUSES:
        fix = "set `api_key` of the endpoint, which probes carry too"
        return [problem(engine.where, f"its health path asks for a key ({status})", fix)]
    if status < 500 and _ends_in_v1(engine):
        fix = "leave /v1 out of the url: clients' paths have it already"
        return [problem(engine.where, f"answers its health path with {status}: its url ends in /v1", fix)]
    if status < 500:
        fix = f"{_WRONG_PORT}, or `health.path` of the cluster"
        return [problem(engine.where, f"answers its health path with {status}: the proxy takes it out", fix)]
    fix = "the engine process is up but its core is not: read its log, restart it"
    return [problem(engine.where, f"reports that it is unhealthy (health {status})", fix)]


@check("api", calls=4)
async def check_api(engine: EngineFacts) -> Sequence[Finding]:
    """Ask its OpenAI API for the list of its models."""
    if not await engine.link.is_reachable():
        return []
    try:
        models = await engine.list_models()
    except ClientError as error:
        if _ends_in_v1(engine) and isinstance(error, NotSupported):
            raise ClientError("its url ends in /v1") from error
        plain = isinstance(error, Refused) and error.status == _PLAIN_HTTP_STATUS
        if (plain or isinstance(error, ClientUnavailable)) and await engine.link.speaks_tls():
            raise ClientError("it speaks TLS, but its url has http") from error
        return [_no_api(engine, error)]
    if not models:
        return [problem(engine.where, "serves no model", "wait until it has loaded one, or read its log")]
    return [ok(engine.where, f"serves {', '.join(model.id for model in models)}")]


def _speaks_tls(where: str) -> Finding:
    return problem(where, "speaks TLS, but its url has http", "write https:// in the url")


def _no_api(engine: EngineFacts, error: ClientError) -> Finding:
    where = engine.where
    had_key = engine.endpoint.api_key is not None
    if isinstance(error, Refused) and error.status in _KEY_STATUSES:
        if had_key:
            return problem(where, f"refuses the endpoint's key ({error.status})", "correct `api_key` of the endpoint")
        fix = (
            "set `api_key` of the endpoint; clients' own keys serve requests, but not tokenize, metrics and this visit"
        )
        return warning(where, f"asks for a key ({error.status})", fix)
    if isinstance(error, NotSupported | BadResponse):
        return problem(where, "answers, but /v1/models is not an engine's", _WRONG_PORT)
    if isinstance(error, ClientTimeout):
        return problem(where, "does not answer /v1/models in time", "it is overloaded or stuck: read its log")
    certificate = isinstance(error, ClientUnavailable) and engine.origin.scheme == "https"
    return problem(where, f"/v1/models fails: {error}", _SHOW_CERTIFICATE if certificate else "read the engine's log")


@check("metrics", calls=3)
async def check_metrics(engine: EngineFacts) -> Sequence[Finding]:
    """Scrape `/metrics` once."""
    await engine.list_models()  # a server that is no engine is reported elsewhere
    lost = "its load and cache size are guessed"
    try:
        metrics = await asyncio.to_thread(parse_engine_metrics, await engine.fetch_exposition())
    except ClientError as error:
        fix = "serve /metrics to the proxy (SGLang: with `--enable-metrics`; vLLM: without `--disable-log-stats`)"
        return [warning(engine.where, f"shows no metrics ({error}): {lost}", fix)]
    if metrics == EngineMetrics(started_at=metrics.started_at):  # shown by any Python service
        what = f"its /metrics hold none of vLLM's or SGLang's figures: {lost}"
        return [warning(engine.where, what, "is it one of them?")]
    if metrics.asleep:
        what = "sleeps by its metrics: it is excluded from routing and was not checked further"
        return [warning(engine.where, what, "wake it (`POST /wake_up`), or take it out of the configuration")]
    capacity = metrics.cache.capacity_tokens if metrics.cache is not None else None
    return [ok(engine.where, f"KV cache of {capacity} tokens" if capacity else "shows its load")]


def _ends_in_v1(engine: EngineFacts) -> bool:
    """Return True for a url that ends in /v1, copied from a client's base_url."""
    return engine.endpoint.url.rstrip("/").endswith("/v1")
