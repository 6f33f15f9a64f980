"""The code speaks the glossary's language."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import ROOT

#: Former names of things that have a better one; parts of identifiers, and words of docstrings.
RETIRED = frozenset(
    {
        *("witness", "onlooker", "deciders", "appointing", "clientele", "outlook", "waitingroom"),
        *("upkeep", "succession", "departure", "mend"),
    }
)
#: Names that are still to go. Nothing is added here.
LEFT = frozenset[str]()
#: A docstring's subject is the thing, not a person.
PERSONS = frozenset({"nobody", "somebody", "whoever", "everybody", "anybody", "anew"})


def _trees(words: frozenset[str], *folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Files of these folders that may hold one of the words, in whatever case: the others need not be parsed."""
    suspected = re.compile("|".join(words))
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if suspected.search(text.lower().replace("_", "")):
                yield path.relative_to(ROOT), ast.parse(text)


def _identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def _words(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", identifier)}


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_no_name_is_a_retired_word() -> None:
    """A word that has another name now does not come back."""
    wrong = {
        f"{path}: {name}"
        for path, tree in _trees(RETIRED, "kvproxy")
        for name in _identifiers(tree)
        if _words(name) & RETIRED or name.lower().replace("_", "") in RETIRED
    }
    assert not wrong


def test_docstrings_speak_of_things() -> None:
    """The endpoint, the request, the connection: none of PERSONS, in tests neither."""
    found = {
        f"{path}: {sorted(persons)}"
        for path, tree in _trees(PERSONS, "kvproxy", "tests", "samples")
        for text in _docstrings(tree)
        if (persons := PERSONS & set(re.findall(r"[a-z]+", text.lower())))
    }
    assert not found
