"""Settings of the filters shipped here, each decoded by its own model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.base.settings.model import HeaderName, Model
from kvproxy.cache.settings import KvCacheSettings


class RequestIdSettings(Model):
    """Settings of `request_id`."""

    header: HeaderName = Field(default="x-request-id", min_length=1)
    """Header read from the client, sent upstream and answered."""
    trust_client: bool = True
    """Take the client's id if it is sane (up to 128 visible ASCII characters)."""


class InferenceRequestSettings(Model):
    """Settings of `inference_request`."""

    session_header: HeaderName = ""
    """Header that names the session, before those that agents send by themselves (docs/sessions.md)."""


def _listed_paths(value: Any) -> Any:
    if value == "all":
        return ("all",)
    if isinstance(value, str):
        raise ValueError("must be a list of paths, or `all`")
    return value


PathList = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed_paths),
    WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Paths, or the word `all`."""


class RouterSettings(Model):
    """Settings of `router`."""

    retired = {"policy_header": "it is `x-kvproxy-policy`"}

    debug_header: HeaderName = "x-kvproxy-debug"
    """A request that carries it gets `x-kvproxy-decision`; empty: no request does."""
    paths: PathList = ()
    """Paths clients may ask for besides inference, `/v1/models` and tokenizing; one that ends in `/` opens all below
    it. `all` opens every path of every engine, also those that load adapters, clear caches or stop it."""
    trust_clients: bool = False
    """Every client is trusted as one with a key marked `trusted` is: only for a listener that no user can reach, or in
    front of a server that is no engine."""
    health_path: str = "/health"
    """`GET` here is answered by the proxy for load balancers, without a key: 200 while every cluster has an endpoint
    that takes requests, else 503. Empty: none."""


#: Settings types of the core's filters; third-party filters bring their own (entry point `kvproxy.filters`).
FILTER_SETTINGS: dict[str, type[Model]] = {
    "inference_request": InferenceRequestSettings,
    "kvcache": KvCacheSettings,
    "request_id": RequestIdSettings,
    "router": RouterSettings,
}


@cache
def filter_models() -> Mapping[str, type[Model]]:
    """Return the settings type of every filter by name, those of features included."""
    added = {name: one.settings for feature in settings_of_features() for name, one in feature.filters.items()}
    return {name: composed(kind) for name, kind in {**added, **FILTER_SETTINGS}.items()}


#: Filters of the core from the outermost to the one next to the engines, all in the default chain. Before the kvcache
#: stand third-party filters, so that they see the parsed request and may refuse it.
CORE_CHAIN: tuple[str, ...] = ("request_id", "inference_request", "kvcache", "router")


def order_filters(names: Iterable[str] = ()) -> list[str]:
    """Return the default chain with `names` added, each at its place; other people's filters in the order given."""
    added = {name: one for feature in settings_of_features() for name, one in feature.filters.items()}
    wanted = dict.fromkeys([*CORE_CHAIN, *(name for name, one in added.items() if one.default), *names])
    placed = {*CORE_CHAIN, *(name for name, one in added.items() if one.before)}
    chain: list[str] = []
    for core in CORE_CHAIN:
        if core == "kvcache":
            chain += [name for name in wanted if name not in placed]
        chain += [name for name, one in added.items() if one.before == core and name in wanted]
        chain.append(core)
    return chain
