"""Makes the Grafana dashboard kvproxy.json of panels.yaml, both beside this file: `python deploy/grafana/build.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILE = HERE / "kvproxy.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
MACROS = {
    "{CLUSTER": '{job=~"$job",instance=~"$instance",cluster=~"$cluster"',
    "{ALL": '{job=~"$job",instance=~"$instance"',
    "[RATE]": "[$__rate_interval]",
}
WIDTH, HEIGHT = 8, 8
#: Rows that are open when the dashboard is.
OPEN = 2


def expand(query: str) -> str:
    """Return the query with its macros replaced."""
    for macro, text in MACROS.items():
        query = query.replace(macro, text)
    return query


def variable(name: str, label: str, series: str) -> dict[str, Any]:
    """Return a variable with the values that a label has in some series."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({series}, {name})", "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def variables() -> list[dict[str, Any]]:
    """Return the data source, then the variables that narrow the series."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("job", "Job", "kvproxy_endpoint_up"),
        variable("instance", "Proxy", 'kvproxy_endpoint_up{job=~"$job"}'),
        {"name": "live_page", "label": "Live page", "type": "textbox", "query": "http://127.0.0.1:8889"},
        variable("cluster", "Cluster", 'kvproxy_endpoint_up{job=~"$job",instance=~"$instance"}'),
    ]


def field_config(panel: dict[str, Any]) -> dict[str, Any]:
    """Return unit, bounds, colours and drawing of a panel's values."""
    steps = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for color, value in panel.get("thresholds", {}).items()]
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short"), "min": 0}
    if "max" in panel:
        defaults["max"] = panel["max"]
    if "states" in panel:
        options = {value: {"text": text, "color": color} for value, (text, color) in panel["states"].items()}
        defaults["mappings"] = [{"type": "value", "options": options}]
    if "kind" not in panel:
        stacked = panel.get("stacked", False)
        defaults["custom"] = {
            "fillOpacity": 30 if stacked else 5,
            "stacking": {"mode": "normal" if stacked else "none"},
            "showPoints": "never",
            "thresholdsStyle": {"mode": "dashed" if "thresholds" in panel else "off"},
        }
    return {"defaults": {**defaults, "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []}


def options(kind: str, unit: str) -> dict[str, Any]:
    """How a kind of panel is drawn."""
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    if kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    legend = {"displayMode": "list", "placement": "bottom"}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def panel_json(panel: dict[str, Any]) -> dict[str, Any]:
    """One panel without its place."""
    kind = panel.get("kind", "timeseries")
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": expand(query),
            "legendFormat": legend,
            "format": "heatmap" if kind == "heatmap" else "time_series",
            "range": True,
        }
        for index, (legend, query) in enumerate(panel["queries"].items())
    ]
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel["about"],
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": field_config(panel),
        "options": options(kind, panel.get("unit", "short")),
    }


def placed(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every row and panel with its place: left to right, top to bottom. Rows beyond the first OPEN are collapsed, and
    hold their panels."""
    y = number = 0
    for index, row in enumerate(rows):
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        x, y, height = 0, y + 1, row.get("height", HEIGHT)
        number += 1
        head = {"id": number, "type": "row", "title": row["row"], "collapsed": index >= OPEN, "gridPos": place}
        panels = []
        for panel in row["panels"]:
            width = panel.get("width", WIDTH)
            if x + width > 24:
                x, y = 0, y + height
            number += 1
            panels.append({"id": number, **panel_json(panel), "gridPos": {"h": height, "w": width, "x": x, "y": y}})
            x += width
        y += height
        yield {**head, "panels": panels if index >= OPEN else []}
        yield from panels if index < OPEN else ()


def links() -> list[dict[str, Any]]:
    """From the dashboard to the proxy's own pages."""
    pages = {"Live page": "${live_page}", "Last decisions": "${live_page}/decisions"}
    return [{"title": title, "type": "link", "url": url, "targetBlank": True} for title, url in pages.items()]


def annotations() -> list[dict[str, Any]]:
    """Return marks on every panel: starts of the proxy, and reloads."""
    events = {
        "Started": "changes(process_start_time_seconds{ALL}[RATE]) > 0",
        "Configuration reloaded": 'increase(kvproxy_reloads_total{ALL,result="applied"}[RATE]) > 0',
        "Configuration refused": 'increase(kvproxy_reloads_total{ALL,result="refused"}[RATE]) > 0',
    }
    return [
        {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "expr": expand(query),
            "iconColor": "red" if name.endswith("refused") else "blue",
            "titleFormat": name,
            "textFormat": "{{instance}}",
        }
        for name, query in events.items()
    ]


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard as Grafana stores it."""
    rows = yaml.safe_load((HERE / "panels.yaml").read_text())
    return {
        "uid": "kvproxy",
        "title": "kvproxy",
        "description": "KV-cache-aware proxy for LLM engines: what it does, and why.",
        "tags": ["kvproxy", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "links": links(),
        "annotations": {"list": annotations()},
        "panels": list(placed(rows)),
    }


def text() -> str:
    """Return the text of kvproxy.json."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
