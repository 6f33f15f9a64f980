"""Every configuration and policy the documentation shows is one that loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvproxy.config.load import load_file, load_text
from kvproxy.config.schema import PolicyName

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def whole_configurations() -> list[tuple[str, str]]:
    """Examples that begin a configuration (others show a part of one and are loaded where their filter is tested)."""
    found = [(page, text) for page in PAGES for text in _YAML.findall(page.read_text())]
    return [(page.name, text) for page, text in found if re.search(r"^endpoints:", text, re.MULTILINE)]


@pytest.mark.parametrize(("page", "text"), whole_configurations())
def test_configurations_in_the_documentation_load(page: str, text: str) -> None:
    """A reader who pastes one gets a proxy that starts."""
    assert load_text(text, env={"ALICE_KEY": "k"}, extra_filters={"model_policy": None}).clusters, page


def test_the_shipped_configuration_loads() -> None:
    """`kvproxy serve -c config.yaml` out of the box."""
    assert len(load_file(ROOT / "config.yaml").clusters["default"].endpoints) == 2


def test_every_policy_is_documented() -> None:
    """The table names each policy once."""
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/policies.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(PolicyName)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links point at files that exist."""
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing
