"""Pixiu's HTTP connection manager: routes, and the filters in our order with their settings."""

from __future__ import annotations

import re
from typing import Any

from kvproxy.base.settings.paths import Path
from kvproxy.features.pixiu.schema import ConnectionManager, Cors, LlmProxy, PixiuRoute, Tokenizer
from kvproxy.operate.config.decode import closest_word
from kvproxy.operate.config.shorthand import Translation
from kvproxy.proxy.filter_settings import filter_models

_KVCACHE = "dgp.filter.ai.kvcache"
_PROXY = "dgp.filter.llm.proxy"
_HTTP_PROXY = "dgp.filter.http.httpproxy"
_TOKENIZER = "dgp.filter.llm.tokenizer"
_CORS = "dgp.filter.http.cors"
_ACCESS_LOG = "dgp.filter.http.accesslog"

#: Settings for a plain HTTP proxy: its upstream is no engine, and its routes name the paths.
_PLAIN = {"paths": "all", "health_path": "", "trust_clients": True}

#: Pixiu's filters that one of ours comes near to.
_NEAREST = {
    "dgp.filter.http.auth.jwt": "auth",
    "dgp.filter.http.authority_config": "auth",
    "dgp.filter.http.ratelimit": "rate_limit",
}


def translate_chain(translation: Translation, manager: ConnectionManager, at: Path, *, has_clusters: bool) -> str:
    """Routes and filters of the manager; returns the scheme of its proxy filter."""
    _routes(translation, list(manager.route_config.routes), (*at, "route_config", "routes"))
    for name in ("request_id", "access_log", "inference_request"):
        if name not in filter_models():
            continue  # a feature that is not installed
        translation.form.filters.append((name, None, (*at, "http_filters")))
    scheme = "http"
    proxy_at = None
    router: dict[str, Any] | None = None
    for index, item in enumerate(manager.http_filters):
        here: Path = (*at, "http_filters", index)
        if item.name == _KVCACHE:
            if proxy_at is not None:
                translation.add_warning(here, "comes after the proxy, where it has no effect: it is moved before it")
            _kvcache(translation, manager, item.config, (*here, "config"), has_clusters=has_clusters)
        elif item.name in (_PROXY, _HTTP_PROXY) and proxy_at is None:
            proxy_at = here
            if item.name == _HTTP_PROXY:
                router = _PLAIN
                translation.add_note((*here, "name"), "a plain HTTP proxy: every path that its routes match is public")
            else:
                translation.add_note((*here, "name"), "only inference and the paths in routes are public")
            proxy = translation.decode_part(LlmProxy, item.config, (*here, "config"))
            scheme = proxy.scheme if proxy is not None else "http"
            _proxy(translation, proxy or LlmProxy(), (*here, "config"))
        elif item.name == _TOKENIZER:
            translation.decode_part(Tokenizer, item.config, (*here, "config"))
            translation.add_note(here, "token usage is always counted from the engine's own figures, in the metrics")
        elif item.name == _CORS:
            _cors(translation, item.config, (*here, "config"))
        elif item.name == _ACCESS_LOG:
            translation.add_note(here, "every request is logged in any case, to the process log")
        else:
            translation.add_unsupported((*here, "name"), f"unknown filter {item.name!r}", _nearest(item.name))
    if proxy_at is None:
        wanted = f"{_PROXY} is required (or {_HTTP_PROXY})"
        translation.add_error((*at, "http_filters"), f"no filter forwards requests: {wanted}")
    translation.form.filters.append(("router", router, proxy_at or (*at, "http_filters")))
    return scheme


_KNOWN = (_KVCACHE, _PROXY, _HTTP_PROXY, _TOKENIZER, _CORS, _ACCESS_LOG)


def _nearest(name: str) -> str:
    """By the last part of the name; the beginnings are all alike."""
    known = {full.rpartition(".")[2]: full for full in (*filter_models(), *_KNOWN)}
    close = closest_word(name.rpartition(".")[2], known)
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
            translation.add_note((*here, "match", "path"), "matches the paths below it, too")
        if route.match.methods:
            translation.add_note(
                (*here, "match", "methods"), "every method is forwarded; engines refuse what they lack"
            )
        if route.match.headers is not None:
            translation.add_unsupported((*here, "match", "headers"), "routes cannot match headers")
        if route.route.cluster_not_found_response_code:
            translation.add_note(
                (*here, "route", "cluster_not_found_response_code"),
                "never sent: a route to an unknown cluster is refused at start",
            )
    native.sort(key=lambda item: len(item[0].rstrip("/")), reverse=True)
    for number, (_, _, here) in enumerate(native):
        translation.form.origins.add_move(("routes", number), here)
        translation.form.origins.add_move(("routes", number, "cluster"), (*here, "route", "cluster"))
        translation.form.origins.add_move(("routes", number, "prefix"), (*here, "match"))
    translation.form.data["routes"] = [route for _, route, _ in native]


def _proxy(translation: Translation, proxy: LlmProxy, at: Path) -> None:
    if proxy.timeout:
        translation.set_value("timeouts", "first_byte", proxy.timeout, (*at, "timeout"))
        translation.set_value("timeouts", "connect", min(proxy.timeout, 2.0), (*at, "timeout"))
        translation.add_note((*at, "timeout"), "bounds connecting and the first byte; it does not cut a running stream")
    if proxy.max_per_host:
        translation.set_value("pool", "max_connections", proxy.max_per_host, (*at, "maxConnsPerHost"))
    if proxy.max_idle_per_host:
        translation.add_note((*at, "maxIdleConnsPerHost"), "256 idle connections at most are kept to each endpoint")
    if proxy.max_idle:
        translation.add_note((*at, "maxIdleConns"), "idle connections are bounded per endpoint only")


def _cors(translation: Translation, raw: Any, at: Path) -> None:
    """Translate CORS. Pixiu only adds headers to answers; ours answers preflight requests too, and distinguishes
    origins by scheme."""
    cors = translation.decode_part(Cors, raw, at)
    if cors is None:
        return
    if not cors.allow_origin:
        translation.add_note(at, "allows no origin as written: left out")
        return
    origins = [
        scheme + origin
        for origin in cors.allow_origin
        for scheme in (("",) if origin == "*" or "://" in origin else ("https://", "http://"))
    ]
    settings: dict[str, Any] = {"allow_origins": origins, "allow_credentials": cors.allow_credentials}
    if cors.expose_headers:
        settings["expose_headers"] = list(cors.expose_headers)
    if cors.allow_methods or cors.allow_headers or cors.max_age is not None:
        translation.add_note(at, "allows GET, POST, DELETE and any request header, 10 minutes after a preflight answer")
    translation.add_note(
        at, "answers browsers' preflight requests too; allow_origin is compared with their Origin header"
    )
    translation.form.filters.append(("cors", settings, at))


def _kvcache(
    translation: Translation, manager: ConnectionManager, config: Any, at: Path, *, has_clusters: bool
) -> None:
    settings = translate_kvcache(translation, dict(config or {}), at)
    translation.form.filters.append(("kvcache", settings, at))
    if not has_clusters:
        _cluster_of_engine(translation, manager, settings, at)


def _cluster_of_engine(translation: Translation, manager: ConnectionManager, settings: Any, at: Path) -> None:
    """Add a cluster of the engine named in a file without clusters (as in Pixiu's documentation)."""
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
    translation.form.origins.add_move(("clusters", names[0]), where)
    translation.form.origins.add_move(("clusters", names[0], "endpoints", 0, "url"), where)
    translation.add_warning(where, f"the file has no clusters: {names[0]!r} becomes this one engine, as {name!r}")


_CONNECTIONS = ("max_idle_conns", "max_idle_conns_per_host", "max_conns_per_host")


def translate_kvcache(translation: Translation, raw: dict[str, Any], at: Path) -> dict[str, Any]:
    """Our settings, still to be decoded; Pixiu's own rules are checked here."""
    settings = {"enabled": False, "lookup_min_tokens": 0, **raw}  # Pixiu is off by default and looks up every prompt
    if str(settings["enabled"]).casefold() == "true":
        _endpoints(translation, settings, at)
    _connections(translation, settings, at)
    settings.setdefault("lookup_min_tokens", 1)  # Pixiu looks up every prompt, however short
    for key in ("hot_max_keys", "hot_max_records", "retry"):
        if settings.pop(key, None) is not None:
            translation.add_note((*at, key), "bounds of this proxy apply")
    breaker = settings.get("circuit_breaker")
    if isinstance(breaker, dict) and "half_open_max_calls" in breaker:
        settings["circuit_breaker"] = {key: breaker[key] for key in breaker if key != "half_open_max_calls"}
        translation.add_note((*at, "circuit_breaker", "half_open_max_calls"), "two probes at once, as is its default")
    strategy = settings.get("cache_strategy")
    if isinstance(strategy, dict):
        strategy = settings["cache_strategy"] = dict(strategy)
        _strategy(translation, strategy, (*at, "cache_strategy"))
    return settings


def _endpoints(translation: Translation, settings: dict[str, Any], at: Path) -> None:
    for key in ("vllm_endpoint", "lmcache_endpoint"):
        value = settings.get(key)
        if isinstance(value, str) and not value.strip():
            translation.add_error((*at, key), "must not be blank when kvcache is enabled")
            del settings[key]
    if "lmcache_endpoint" not in settings:
        translation.add_error((*at, "lmcache_endpoint"), "required when kvcache is enabled")
    if "vllm_endpoint" not in settings:
        translation.add_note((*at, "vllm_endpoint"), "not given: an endpoint that serves the model tokenizes")


def _connections(translation: Translation, settings: dict[str, Any], at: Path) -> None:
    """Check the bounds on connections, which are fixed here."""
    given = {key: settings.pop(key) for key in _CONNECTIONS if key in settings}
    for key, value in given.items():
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)):
            translation.add_error((*at, key), "must be a number of connections, 0 for the default")
        else:
            translation.add_note((*at, key), "64 connections at most lead to each of the two services")


def _strategy(translation: Translation, strategy: dict[str, Any], at: Path) -> None:
    method = strategy.pop("compress_method", None)
    if strategy.get("enable_compression") and isinstance(method, str) and method != "cachegen":
        translation.add_note(
            (*at, "compress_method"), "LMCache compresses with cachegen only; it ignores other methods"
        )
    if strategy.get("enable_compression") or strategy.get("enable_eviction"):
        translation.add_note(
            at,
            "load and memory are the engine's (load_source, memory_source), not this process's; compress and evict act "
            "on the coldest prefixes, never on the one just served",
        )
    if strategy.get("enable_eviction"):
        translation.add_note(
            (*at, "enable_eviction"),
            "LMCache's controller cannot evict one prefix; clearing the whole location needs allow_clear",
        )
