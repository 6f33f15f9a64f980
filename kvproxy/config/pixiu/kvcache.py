"""`dgp.filter.ai.kvcache` into our kvcache settings. Most names are the same; what is not listed here passes through,
so our own settings may stand in a Pixiu file as well.
"""

from __future__ import annotations

import re
from typing import Any

from kvproxy.config.paths import Path
from kvproxy.config.pixiu.translation import Translation

_CONNECTIONS = ("max_idle_conns", "max_idle_conns_per_host", "max_conns_per_host")


def translate_kvcache(translation: Translation, raw: dict[str, Any], at: Path) -> dict[str, Any]:
    """Our settings, still to be decoded; Pixiu's own rules are checked here."""
    settings = {"enabled": False, "lookup_min_tokens": 0, **raw}  # Pixiu is off by default and looks up every prompt
    if str(settings["enabled"]).casefold() == "true":
        _endpoints(translation, settings, at)
    _connections(translation, settings, at)
    settings.setdefault("lookup_min_tokens", 1)  # Pixiu asks for every prompt, however short
    settings.setdefault("tokenize", {"inline_min": 0})
    if str(settings.get("hot_max_keys", "")) == "0":
        del settings["hot_max_keys"]
        translation.note((*at, "hot_max_keys"), "not unlimited here: the default bound applies")
    strategy = settings.get("cache_strategy")
    if isinstance(strategy, dict):
        _strategy(translation, strategy, (*at, "cache_strategy"))
    return settings


def _endpoints(translation: Translation, settings: dict[str, Any], at: Path) -> None:
    for key in ("vllm_endpoint", "lmcache_endpoint"):
        value = settings.get(key)
        if isinstance(value, str) and not value.strip():
            translation.error((*at, key), "must not be blank when kvcache is enabled")
            del settings[key]
    if "lmcache_endpoint" not in settings:
        translation.error((*at, "lmcache_endpoint"), "required when kvcache is enabled")
    if "vllm_endpoint" not in settings:
        translation.note((*at, "vllm_endpoint"), "not given: an endpoint that serves the model tokenizes")


def _connections(translation: Translation, settings: dict[str, Any], at: Path) -> None:
    """The bound on connections is ours; idle ones are kept up to it."""
    given = {key: settings.pop(key) for key in _CONNECTIONS if key in settings}
    for key, value in given.items():
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)):
            translation.error((*at, key), "must be a number of connections, 0 for the default")
        elif key == "max_conns_per_host" and int(value):
            settings["max_connections"] = int(value)
        elif key != "max_conns_per_host":
            translation.note((*at, key), "connections are bounded by max_conns_per_host alone")


def _strategy(translation: Translation, strategy: dict[str, Any], at: Path) -> None:
    method = strategy.get("compress_method")
    if strategy.get("enable_compression") and isinstance(method, str) and method != "cachegen":
        translation.note((*at, "compress_method"), "LMCache compresses with cachegen only; it ignores other methods")
    if strategy.get("enable_compression") or strategy.get("enable_eviction"):
        translation.note(
            at,
            "load and memory are the engine's (load_source, memory_source), not this process's; compress and evict act "
            "on the coldest prefixes, never on the one just served",
        )
    if strategy.get("enable_eviction"):
        translation.note(
            (*at, "enable_eviction"),
            "LMCache's controller cannot evict one prefix; clearing the whole location needs allow_clear",
        )
