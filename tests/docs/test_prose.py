"""Docstrings and documentation keep to the rules for words (`python -m tests.prose` lists the exceptions)."""

from __future__ import annotations

import pytest

from tests.prose import SOURCES, find_broken

#: Largest share of sentences that may break a rule, by text and rule.
LIMITS = {
    ("docstrings", "clause"): 0.002,
    ("docstrings", "talk"): 0.002,
    ("docs", "clause"): 0.01,
    ("docs", "talk"): 0.01,
}


@pytest.mark.parametrize(("text", "rule"), LIMITS)
def test_few_sentences_break_the_rules(text: str, rule: str) -> None:
    """The subject of a sentence is a named thing, and programs send, report and estimate."""
    found = list(SOURCES[text]())
    wrong = find_broken(rule, found)
    assert len(wrong) <= LIMITS[text, rule] * len(found), wrong
