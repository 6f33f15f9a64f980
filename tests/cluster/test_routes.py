"""Which cluster a request goes to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import Routes
from kvproxy.cluster.settings import ClusterSettings, RouteSettings
from kvproxy.operate.config.schema import Config
from tests.cluster.conftest import configs
from tests.support.clock import FakeClock


def clusters(**models: tuple[str, ...]) -> dict[str, Cluster]:
    """Clusters by name, each with one endpoint that declares these models."""
    return {
        name: Cluster(
            name,
            ClusterSettings(endpoints=configs(name, models=declared)),
            metrics=Metrics(),
            clock=FakeClock(),
            rng=random.Random(1),
        )
        for name, declared in models.items()
    }


def routes_of(routes: list[dict[str, Any]], **models: tuple[str, ...]) -> Routes:
    config = Config(routes=tuple(RouteSettings(**route) for route in routes))
    return Routes.from_settings(config.routes, clusters(**models))


def where(routes: Routes, path: str = "/v1/chat/completions", model: str = "") -> tuple[str, str] | None:
    target = routes.resolve(path, model)
    assert routes.resolve(path, model) == target  # also from memory
    return None if target is None else (target.cluster.name, target.upstream_model)


@pytest.mark.parametrize(
    ("path", "model", "expected"),
    [
        ("/v1/chat/completions", "llama", ("a", "")),
        ("/v1/chat/completions", "llama-70b", ("b", "")),
        ("/v1/chat/completions", "gpt-4", ("b", "qwen")),
        ("/v1/embeddings", "gpt-4", ("c", "")),
        ("/v1/embeddingsx", "other", None),
        ("/v1/embeddings/x", "", ("c", "")),
        ("/v2/x", "anything", ("d", "")),
        ("/v2/x", "", ("d", "")),
        ("/v3", "", None),
        ("*", "", None),
    ],
)
def test_the_first_match_wins(path: str, model: str, expected: tuple[str, str] | None) -> None:
    """By path prefix up to a segment's end, and by model with a trailing `*`."""
    routes = routes_of(
        [
            {"prefix": "/v1/embeddings", "cluster": "c"},
            {"model": "llama", "cluster": "a"},
            {"model": "llama-*", "cluster": "b"},
            {"model": "gpt-4", "cluster": "b", "upstream_model": "qwen"},
            {"prefix": "/v2/", "model": "*", "cluster": "d"},
        ],
        a=(),
        b=(),
        c=(),
        d=(),
    )
    assert where(routes, path, model) == expected


def test_everything_goes_to_the_only_cluster() -> None:
    """Without routes."""
    routes = routes_of([], default=())
    assert where(routes, "/anything", "m") == ("default", "")
    assert where(routes, "/", "") == ("default", "")


@pytest.mark.parametrize(("model", "expected"), [("x", "a"), ("y", "b"), ("both", "a"), ("nobody", "a"), ("", "a")])
def test_among_catch_alls_the_one_that_declares_the_model_wins(model: str, expected: str) -> None:
    """The first in order when several do, or none."""
    assert where(routes_of([], a=("x", "both"), b=("y", "both")), model=model) == (expected, "")
    listed = routes_of([{"cluster": "a"}, {"cluster": "b"}], a=("x", "both"), b=("y", "both"))
    assert where(listed, model=model) == (expected, "")


def test_a_route_that_names_the_model_is_not_second_guessed() -> None:
    """Declared models only decide between routes that name none."""
    routes = routes_of([{"model": "x", "cluster": "a"}, {"cluster": "b"}], a=(), b=("x",))
    assert where(routes, model="x") == ("a", "")
    earlier = routes_of([{"cluster": "a"}, {"cluster": "b"}, {"model": "x", "cluster": "a"}], a=(), b=("x",))
    assert where(earlier, model="x") == ("a", "")


def test_declared_models_are_those_of_the_moment() -> None:
    """A remembered answer follows endpoints that come and go."""
    both = clusters(a=(), b=())
    routes = Routes.from_settings((), both)
    assert where(routes, model="x") == ("a", "")
    both["b"].apply_endpoints(configs("b", models=("x",)))
    assert where(routes, model="x") == ("b", "")


def test_an_alias_is_declared_under_its_upstream_name() -> None:
    """That is the name engines know."""
    routes = routes_of([{"cluster": "a"}, {"cluster": "b", "upstream_model": "qwen"}], a=(), b=("qwen",))
    assert where(routes, model="gpt-4") == ("b", "qwen")


def test_a_route_to_nowhere_is_refused() -> None:
    """The checker says so with a path; building must not pass over it."""
    with pytest.raises(KeyError, match="nowhere"):
        routes_of([{"cluster": "nowhere"}], a=())


def test_the_memory_is_bounded() -> None:
    """Paths and models are made by clients; answers stay right when it starts over, and long ones are not kept."""
    routes = routes_of([{"prefix": "/a", "cluster": "a"}, {"cluster": "b"}], a=(), b=())
    for number in range(10_000):
        assert where(routes, f"/a/{number}", "m") == ("a", "")
    assert len(routes._remembered) <= 4096
    before = len(routes._remembered)
    assert where(routes, "/b" + "x" * 10_000, "m") == ("b", "")
    assert len(routes._remembered) == before
