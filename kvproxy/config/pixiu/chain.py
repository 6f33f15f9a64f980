"""Pixiu's HTTP connection manager: routes, and the filters in our order."""

from __future__ import annotations

from typing import Any

from kvproxy.config.fields import closest
from kvproxy.config.paths import Path
from kvproxy.config.pixiu.kvcache import translate_kvcache
from kvproxy.config.pixiu.schema import ConnectionManager, LlmProxy, PixiuRoute, Tokenizer
from kvproxy.config.pixiu.translation import Translation
from kvproxy.config.schema import FILTER_SETTINGS

_KVCACHE = "dgp.filter.ai.kvcache"
_PROXY = "dgp.filter.llm.proxy"
_TOKENIZER = "dgp.filter.llm.tokenizer"

#: Pixiu's filters that one of ours comes near to.
_NEAREST = {
    "dgp.filter.http.accesslog": "access_log",
    "dgp.filter.http.auth.jwt": "auth",
    "dgp.filter.http.authority_config": "auth",
    "dgp.filter.http.cors": "cors",
    "dgp.filter.http.httpproxy": _PROXY,
    "dgp.filter.http.ratelimit": "rate_limit",
}


def translate_chain(translation: Translation, manager: ConnectionManager, at: Path, *, has_clusters: bool) -> str:
    """Routes and filters of the manager; returns the scheme of its proxy filter."""
    _routes(translation, list(manager.route_config.routes), (*at, "route_config", "routes"))
    for name in ("request_id", "access_log", "inference_request"):
        translation.form.filters.append((name, None, (*at, "http_filters")))
    scheme, proxy_at = "http", None
    for index, item in enumerate(manager.http_filters):
        here: Path = (*at, "http_filters", index)
        if item.name == _KVCACHE:
            if proxy_at is not None:
                translation.warn(here, f"stands after {_PROXY}, where it could not act: it is moved before it")
            _kvcache(translation, manager, item.config, (*here, "config"), has_clusters=has_clusters)
        elif item.name == _PROXY and proxy_at is None:
            proxy_at = here
            proxy = translation.decode(LlmProxy, item.config, (*here, "config"))
            scheme = proxy.scheme if proxy is not None else "http"
            _proxy(translation, proxy or LlmProxy(), (*here, "config"))
        elif item.name == _TOKENIZER:
            translation.decode(Tokenizer, item.config, (*here, "config"))
            translation.note(here, "token usage is always counted from the engine's own figures, in the metrics")
        else:
            translation.unsupported((*here, "name"), f"unknown filter {item.name!r}", _nearest(item.name))
    if proxy_at is None:
        translation.error((*at, "http_filters"), f"no filter forwards requests: {_PROXY} is required")
    translation.form.filters.append(("router", None, proxy_at or (*at, "http_filters")))
    return scheme


def _nearest(name: str) -> str:
    """By the last part of the name; the beginnings are all alike."""
    known = {full.rpartition(".")[2]: full for full in (*FILTER_SETTINGS, _KVCACHE, _PROXY, _TOKENIZER)}
    close = closest(name.rpartition(".")[2], known)
    meant = _NEAREST.get(name) or (known[close] if close else "")
    return f"nearest: {meant}" if meant else ""


def _routes(translation: Translation, routes: list[PixiuRoute], at: Path) -> None:
    """Pixiu takes the longest match, we the first: so the longest go first."""
    native: list[tuple[str, dict[str, Any], Path]] = []
    for index, route in enumerate(routes):
        here: Path = (*at, index)
        prefix = route.match.path or route.match.prefix or "/"
        native.append((prefix, {"prefix": prefix, "cluster": route.route.cluster}, here))
        if route.match.path:
            translation.note((*here, "match", "path"), "matches the paths below it, too")
        if route.match.methods:
            translation.note((*here, "match", "methods"), "every method is forwarded; engines refuse what they lack")
        if route.match.headers is not None:
            translation.unsupported((*here, "match", "headers"), "routes cannot match headers")
        if route.route.cluster_not_found_response_code:
            translation.note(
                (*here, "route", "cluster_not_found_response_code"),
                "never sent: a route to an unknown cluster is refused at start",
            )
    native.sort(key=lambda item: len(item[0].rstrip("/")), reverse=True)
    for number, (_, _, here) in enumerate(native):
        translation.form.origins.add(("routes", number), here)
        translation.form.origins.add(("routes", number, "cluster"), (*here, "route", "cluster"))
        translation.form.origins.add(("routes", number, "prefix"), (*here, "match"))
    translation.form.data["routes"] = [route for _, route, _ in native]


def _proxy(translation: Translation, proxy: LlmProxy, at: Path) -> None:
    if proxy.timeout:
        translation.put("timeouts", "first_byte", proxy.timeout, (*at, "timeout"))
        translation.put("timeouts", "connect", min(proxy.timeout, 2.0), (*at, "timeout"))
        translation.note((*at, "timeout"), "bounds connecting and the first byte; it does not cut a running stream")
    if proxy.max_per_host:
        translation.put("pool", "max_connections", proxy.max_per_host, (*at, "maxConnsPerHost"))
    if proxy.max_idle_per_host:
        translation.put("pool", "max_idle", proxy.max_idle_per_host, (*at, "maxIdleConnsPerHost"))
    if proxy.max_idle:
        translation.note((*at, "maxIdleConns"), "idle connections are bounded per endpoint only")


def _kvcache(
    translation: Translation, manager: ConnectionManager, config: Any, at: Path, *, has_clusters: bool
) -> None:
    settings = translate_kvcache(translation, dict(config or {}), at)
    translation.form.filters.append(("kvcache", settings, at))
    if not has_clusters:
        _cluster_of_engine(translation, manager, settings, at)


def _cluster_of_engine(translation: Translation, manager: ConnectionManager, settings: Any, at: Path) -> None:
    """A file without clusters (as in Pixiu's documentation) still says where one engine is."""
    url = settings.get("vllm_endpoint")
    names = sorted({route.route.cluster for route in manager.route_config.routes})
    if not isinstance(url, str) or not url.strip() or len(names) != 1:
        return
    strategy = settings.get("cache_strategy")
    plan = strategy if isinstance(strategy, dict) else {}
    named = (plan.get(key) for key in ("pin_instance_id", "compress_instance_id", "evict_instance_id"))
    instances = {name for name in named if isinstance(name, str) and name}
    name = instances.pop() if len(instances) == 1 else "vllm"
    translation.form.data["clusters"] = {names[0]: {"endpoints": [{"id": name, "url": url}]}}
    where: Path = (*at, "vllm_endpoint")
    translation.form.origins.add(("clusters", names[0]), where)
    translation.form.origins.add(("clusters", names[0], "endpoints", 0, "url"), where)
    translation.warn(where, f"the file has no clusters: {names[0]!r} becomes this one engine, as {name!r}")
