"""Dashboard and alert rules ask for metrics, labels and label values that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import SCRAPED, Query

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "kvproxy.json").read_text())
#: Rows that are collapsed hold their panels; those of open rows come after them.
PLACED: list[dict[str, Any]] = [inner for one in DASHBOARD["panels"] for inner in (one, *one.get("panels", ()))]
PANELS: list[dict[str, Any]] = [panel for panel in PLACED if panel["type"] != "row"]
ANNOTATIONS: list[dict[str, Any]] = DASHBOARD["annotations"]["list"]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
SOURCE = "\n".join(path.read_text() for path in (ROOT / "kvproxy").rglob("*.py"))
_FREE = SCRAPED | {"status", "cluster", "queue"}  # values of these labels are no closed set of the program


def queries() -> list[Any]:
    found = [pytest.param(t["expr"], id=f"{p['title']}: {t['legendFormat']}") for p in PANELS for t in p["targets"]]
    found += [pytest.param(one["expr"], id=one["name"]) for one in ANNOTATIONS if "process_" not in one["expr"]]
    return found + [pytest.param(rule["expr"], id=rule["alert"]) for rule in RULES]


@pytest.mark.parametrize("text", queries())
def test_a_query_names_only_what_exists(text: str) -> None:
    """Metrics with the right suffix, their labels, known functions, balanced brackets."""
    assert Query(text).problems() == []


@pytest.mark.parametrize("text", queries())
def test_values_of_labels_are_words_of_the_program(text: str) -> None:
    """A reason that was renamed would leave a panel empty and an alert silent for ever."""
    for _, label, value in Query(text).matchers:
        if label not in _FREE:
            assert [word for word in value.split("|") if f'"{word}"' not in SOURCE] == [], label


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sum (rate(kvproxy_nothing_total[5m]))", "no metric is called kvproxy_nothing_total"),
        ("sum (rate(kvproxy_requests[5m]))", "no metric is called kvproxy_requests"),
        ("sum by (reason) (rate(kvproxy_requests_total[5m]))", "cannot be grouped by reason"),
        ('rate(kvproxy_requests_total{outcome="x"}[5m])', "has no label outcome"),
        ("kvproxy_requests_total > 1", "only ever grows"),
        ("rate(kvproxy_in_flight[5m])", "is a gauge"),
        ("histogram_quantile(0.9, sum by (cluster) (rate(kvproxy_ttft_seconds_bucket[5m])))", "needs `by (le)`"),
        ("summ (kvproxy_in_flight)", "no function is called summ"),
        ("sum (kvproxy_in_flight", "unbalanced ()"),
        ("vector(1)", "names no metric"),
    ],
)
def test_findings_of_the_check(text: str, problem: str) -> None:
    """The check itself can fail."""
    assert any(problem in found for found in Query(text).problems())


def test_the_committed_dashboard_is_made_of_its_table() -> None:
    """After a change of panels.yaml: `python deploy/grafana/build.py`."""
    spec = importlib.util.spec_from_file_location("build_dashboard", GRAFANA / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert (GRAFANA / "kvproxy.json").read_text() == build.text()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_legends_show_labels_that_results_have(panel: dict[str, Any]) -> None:
    """A legend of a label that was summed away would be empty."""
    for target in panel["targets"]:
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert used <= Query(target["expr"]).result_labels
        assert panel["description"]


def test_panels_have_places_of_their_own() -> None:
    """No two overlap, none leaves the grid, ids are unique."""
    ids = [panel["id"] for panel in PLACED]
    assert len(ids) == len(set(ids))
    cells = [
        {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        for g in (panel["gridPos"] for panel in PLACED)
    ]
    assert all(x < 24 for cell in cells for x, _ in cell)
    assert not any(one & other for one, other in combinations(cells, 2))


def test_two_questions_are_open() -> None:
    """Is it well, and what do clients see; the others are asked for by a click, and marked on all are reloads."""
    rows = [panel for panel in PLACED if panel["type"] == "row"]
    assert [row["collapsed"] for row in rows] == [False, False, *[True] * (len(rows) - 2)]
    assert all(bool(row["panels"]) is row["collapsed"] for row in rows)
    assert "Configuration reloaded" in {one["name"] for one in ANNOTATIONS}
    assert DASHBOARD["links"]


def test_alerts_and_panels_mean_by_failed_what_the_page_means() -> None:
    """One metric, counted by the function that the page, the status and the access log ask too."""
    (alert,) = [rule["expr"] for rule in RULES if rule["alert"] == "KvproxyErrors"]
    (panel,) = [target["expr"] for one in PANELS if one["title"] == "Failed" for target in one["targets"]]
    for text in (alert, panel):
        assert {(name, label, value) for name, label, value in Query(text).matchers if label == "result"} == {
            ("kvproxy_request_results_total", "result", "failed")
        }
        assert set(Query(text).metrics) == {"kvproxy_request_results_total"}


def test_variables_used_are_variables_defined() -> None:
    """Grafana replaces an unknown one by nothing."""
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps([DASHBOARD[part] for part in ("panels", "links", "annotations")])
    assert set(re.findall(r"\$\{?(?!__)(\w+)", text)) <= defined


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_happens_and_how_urgent_it_is(rule: dict[str, Any]) -> None:
    """Severity, summary and description; templates name labels of the result; the documentation knows what to do."""
    assert rule["labels"]["severity"] in {"page", "ticket"}
    texts = rule["annotations"]["summary"] + rule["annotations"]["description"]
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= Query(rule["expr"]).result_labels
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert f"`{rule['alert']}`" in (ROOT / "docs/deployment.md").read_text()


def test_alerts_have_names_of_their_own() -> None:
    """Silences and routes go by name."""
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
