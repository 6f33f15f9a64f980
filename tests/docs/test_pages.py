"""Promises of the pages about themselves: links that lead somewhere, tables that name everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

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


GENERATED = {"configuration.md", "metrics.md", "python-reference.md"}
BY_HAND = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED),
]
FEATURES = sorted((ROOT / "kvproxy" / "features").glob("*/README.md"))


def test_the_documentation_stays_short() -> None:
    """At most 25 pages by hand, each feature's page beside them: a new subject takes the place of another."""
    assert len(BY_HAND) <= 25
    assert sum(_count_words(page) for page in BY_HAND) <= 23_000
    assert {page.parent.name: _count_words(page) for page in FEATURES if _count_words(page) > 900} == {}


def _count_words(page: Path) -> int:
    return len(page.read_text().split())


def test_the_site_lists_every_page() -> None:
    """In its navigation, which names no page that is gone. packaging/site.py adds the features' pages."""
    listed = set(_pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    wanted = {str(page.relative_to(ROOT)) for page in BY_HAND}
    assert wanted - listed == set()
    assert [page for page in sorted(listed) if not (ROOT / page).exists()] == []


def _pages_of(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        yield from _pages_of(list(entry.values()))
    elif isinstance(entry, list):
        for one in entry:
            yield from _pages_of(one)
