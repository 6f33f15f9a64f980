"""What the pages promise of themselves: links that lead somewhere, tables that name everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvproxy.cluster.settings import PolicyName
from tests.docs.blocks import PAGES, ROOT

_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_every_policy_is_documented() -> None:
    """The table names each policy once."""
    beginning = (ROOT / "docs/policies.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", beginning, re.MULTILINE)
    assert sorted(rows) == sorted(PolicyName)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links point at files that exist."""
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings(page: Path) -> None:
    """A link to a place in a page names a heading there."""
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text())
    missing = [anchor for file, anchor in links if anchor not in _anchors(page.parent / file if file else page)]
    assert not missing
