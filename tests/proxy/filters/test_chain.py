"""build_chain: filters by name, in order, and every mistake named."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.model import Model
from kvproxy.proxy.filter_settings import FILTER_SETTINGS
from kvproxy.proxy.filters.chain import FilterContext, FilterType, build_chain
from kvproxy.proxy.filters.registry import FILTERS
from kvproxy.proxy.settings import FilterSpec
from tests.support.asgi import Inner, call, http_scope
from tests.support.filter_context import filter_context


class TagSettings(Model):
    """Settings of the filter under test."""

    tag: str = "-"
    times: int = 1


class Tag:
    """Appends its tag to `scope["tags"]`."""

    def __init__(self, app: ASGIApp, tag: str) -> None:
        self._app = app
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("tags", []).append(self._tag)
        await self._app(scope, receive, send)


def build_tag(app: ASGIApp, settings: TagSettings, context: FilterContext) -> ASGIApp:
    return Tag(app, settings.tag * settings.times)


def refuse(app: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
    raise ConfigError([Problem("keys[0]", "bad key"), Problem("", "nothing to do", "remove it")])


def crash(app: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
    raise RuntimeError("boom")


PLAIN = FilterType(None, lambda app, settings, context: app)
TYPES = {
    "tag": FilterType(TagSettings, build_tag),
    "plain": PLAIN,
    "end": FilterType(None, lambda app, settings, context: app, terminal=True),
    "refuse": FilterType(None, refuse),
    "crash": FilterType(None, crash),
}


def spec(name: str, **settings: Any) -> FilterSpec:
    return FilterSpec(name=name, settings=settings or None)


async def tags(*specs: FilterSpec) -> list[str]:
    inner, scope = Inner(), http_scope()
    await call(build_chain(specs, inner, context=filter_context(), types=TYPES), scope)
    assert len(inner.scopes) == 1
    return list(scope.get("tags", []))


async def test_the_first_filter_is_outermost() -> None:
    """Order in the file is the order of the request's way."""
    assert await tags(spec("tag", tag="a"), spec("plain"), spec("tag", tag="b"), spec("end")) == ["a", "b"]


async def test_no_filter_leaves_the_terminal_app() -> None:
    """An empty chain is its terminal app."""
    assert await tags() == []


async def test_settings_as_mapping_object_or_nothing() -> None:
    """A mapping is validated into the filter's own type; nothing gives its defaults; an object is taken as it is."""
    ready = FilterSpec(name="tag", settings=TagSettings(tag="x", times=3))
    assert await tags(spec("tag"), spec("tag", tag="b", times="2"), ready) == ["-", "bb", "xxx"]


def test_settings_without_a_type_are_plain_data() -> None:
    """A filter that names no settings type gets what the file says."""
    got: list[Any] = []
    kind = FilterType(None, lambda app, settings, context: got.append(settings) or app)  # type: ignore[func-returns-value]
    specs = [spec("any", a=[1]), spec("any")]
    build_chain(specs, Inner(), context=filter_context(), types={"any": kind})
    assert got == [None, {"a": [1]}]


def problems_of(*specs: FilterSpec) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_chain(specs, Inner(), context=filter_context(), types=TYPES)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([spec("tagg")], ["filters[0].tagg: no filter is called 'tagg' (did you mean 'tag'?)"]),
        ([spec("zzz")], ["filters[0].zzz: no filter is called 'zzz' (known: crash, end, plain, refuse, tag)"]),
        ([spec("tag", tug="x")], ["filters[0].tag.tug: Extra inputs are not permitted"]),
        ([spec("crash")], ["filters[0].crash: cannot be built: RuntimeError: boom"]),
        (
            [spec("plain"), spec("refuse")],
            ["filters[1].refuse: nothing to do (remove it)", "filters[1].refuse.keys[0]: bad key"],
        ),
        (
            [spec("end"), spec("tag")],
            ["filters[0].end: is terminal, so the filters after it never run (put it last)"],
        ),
    ],
)
def test_mistakes_are_named(specs: list[FilterSpec], expected: list[str]) -> None:
    """Which filter, where in its settings, what is wrong."""
    assert problems_of(*specs) == expected


def test_every_mistake_at_once_and_no_value_in_the_text() -> None:
    """All filters are tried; a wrong setting's value may be a secret and is not repeated."""
    found = problems_of(spec("tag", times="sk-secret"), spec("nobody"), spec("crash"))
    assert [text.partition(":")[0] for text in found] == [
        "filters[0].tag.times",
        "filters[1].nobody",
        "filters[2].crash",
    ]
    assert "sk-secret" not in "".join(found)


def test_shipped_filters_have_the_settings_the_configuration_knows() -> None:
    """One name, one settings type, in both tables."""
    assert {name: kind.settings for name, kind in FILTERS.items()} == {name: FILTER_SETTINGS[name] for name in FILTERS}
    assert {"request_id", "inference_request", "kvcache", "router"} <= set(FILTERS)


def test_shipped_filters_build_with_what_they_need() -> None:
    """The whole shipped chain, each filter with the least settings it can work with."""
    specs = [spec("request_id"), spec("inference_request")]
    assert build_chain(specs, Inner(), context=filter_context(), types=FILTERS) is not None
