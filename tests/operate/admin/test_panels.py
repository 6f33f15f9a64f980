"""Panels that features add to the live page."""

from __future__ import annotations

from kvproxy.base.installed import installed
from kvproxy.operate.admin.live import list_page_paths
from kvproxy.operate.feature import Feature
from tests.operate.admin.support import admin_of, proxy_of
from tests.support.clock import FakeClock


async def test_each_panel_stands_in_the_page_and_its_script_is_loaded() -> None:
    """In the order of the features; without a token, as all of the page."""
    names = [feature.panel for feature in installed(Feature) if feature.panel]
    proxy = proxy_of(clock=FakeClock(), endpoints=["http://127.0.0.1:9"], admin={"token": "secret"})
    async with admin_of(proxy) as client:
        page = (await client.get("/")).text
        listed = (await client.get("/panels.js")).text
        scripts = [await client.get(f"/{name}.js") for name in names]
    assert "panels of features" not in page
    assert [f'id="{name}-card"' in page for name in names] == [True] * len(names)
    assert listed.endswith(f"export const PANELS = [{', '.join(names)}];\n")
    assert [(one.status_code, "export function show(" in one.text) for one in scripts] == [(200, True)] * len(names)
    assert {f"/{name}.js" for name in names} < list_page_paths()
