"""What the documentation told plug-ins and apps to import before the rooms were moved still works, and warns."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from kvproxy.config.cluster_schema import EndpointSettings
from kvproxy.config.load import load_config, load_text
from kvproxy.filters.chain import FilterContext, FilterType
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.filter_context import counted, filter_context

#: As a distribution of that time has it; the rest of the interface it uses is in test_documented_filter.
PLUGIN = """
from kvproxy.filters.exchange import Exchange
from kvproxy.filters.local_reply import local_reply


class Tenants:
    def __init__(self, app, settings, context):
        self._app, self._context = app, context
        self.ends = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            exchange = Exchange.of(scope, now=self._context.clock())
            exchange.on_complete.append(lambda exchange: self.ends.append(exchange.outcome.end))
            if not exchange.tenant:
                metrics = self._context.metrics
                await local_reply(scope, send, status=403, reason="no_tenant", message="No key.", metrics=metrics)
                return
        await self._app(scope, receive, send)
"""


@pytest.mark.parametrize("module", ["kvproxy.filters.exchange", "kvproxy.filters.local_reply"])
def test_a_former_module_warns(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, where it is imported."""
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(DeprecationWarning, match=r"kvproxy\.request"):
        importlib.import_module(module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_filter_with_the_former_imports_runs() -> None:
    """It shares the exchange with the shipped filters, and its answer is theirs."""
    names: dict[str, Any] = {}
    exec(compile(PLUGIN, "plugin", "exec"), names)
    context: FilterContext = filter_context(clock=FakeClock())
    app = FilterType(None, names["Tenants"]).build(Inner(), None, context)
    reply = await call(app, http_scope())
    assert (reply.status, reply.json["error"]["code"]) == (403, "no_tenant")
    assert counted(context, "kvproxy_local_replies_total", status="403", reason="no_tenant") == 1.0


def test_an_endpoint_of_the_middleware_has_its_former_name() -> None:
    """`kvproxy.config.schema.Endpoint`; other names are missing as everywhere."""
    schema = importlib.import_module("kvproxy.config.schema")
    with pytest.warns(DeprecationWarning, match="EndpointSettings"):
        assert schema.Endpoint is EndpointSettings
    with pytest.raises(AttributeError, match="Enpoint"):
        _ = schema.Enpoint


def test_text_is_loaded_by_the_former_name() -> None:
    """With the options of `load_config`."""
    text = "endpoints: ['http://${HOST}:8000']"
    with pytest.warns(DeprecationWarning, match="load_config"):
        config = load_text(text, env={"HOST": "a"})
    assert config == load_config(text, env={"HOST": "a"})
