"""Docstrings and documentation keep to the rules for words (`python -m tests.prose` lists the exceptions)."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.prose import ROOT, SOURCES, find_broken

#: Largest share of sentences that may break a rule, by text and rule.
LIMITS = {
    ("docstrings", "clause"): 0.002,
    ("docstrings", "talk"): 0.002,
    ("docs", "clause"): 0.01,
    ("docs", "talk"): 0.01,
}


_CLAUSE = re.compile(r'"{3}What |def test_wh(?:at|o)_')


@cache
def sentences(text: str) -> list[tuple[str, str]]:
    """Return the sentences of a text with their places."""
    return list(SOURCES[text]())


@pytest.mark.parametrize(("text", "rule"), LIMITS)
def test_few_sentences_break_the_rules(text: str, rule: str) -> None:
    """The subject of a sentence is a named thing, and programs send, report and estimate."""
    found = sentences(text)
    wrong = find_broken(rule, found)
    assert len(wrong) <= LIMITS[text, rule] * len(found), wrong


@pytest.mark.parametrize("folder", ["benchmarks", "kvproxy", "packaging", "samples", "tests"])
def test_docstrings_and_names_of_tests_begin_with_no_clause(folder: str) -> None:
    """The name of a test is its case."""
    sources = (ROOT / folder).rglob("*.py")
    assert [str(path) for path in sources if _CLAUSE.search(path.read_text())] == []
