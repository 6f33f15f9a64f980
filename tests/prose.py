"""Share of sentences that break the rules for words: `python -m tests.prose [--list clause|talk]`.

Counts docstrings of the package and the prose of the documentation. A sentence breaks the rule `clause` if a relative
clause is its subject ("What comes late still teaches"), and `talk` if a program says, tells, hears, knows or believes.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: Beginnings of a sentence whose subject is a clause.
CLAUSE = re.compile(
    r"^(?:(?:Of|As|By|To|For|In|From|With) )?(?:What|Whatever|Who|Whoever|Whose|Whether|Which|That which|"
    r"(?:One|Ones|Those|All|Any|Anything|Nothing|Everything|Something|It) (?:that|which|who|whose))\b"
)
#: Verbs of speech and thought, which programs do not do.
TALK = re.compile(r"\b(?:says?|said|tells?|told|hears?|heard|knows?|believes?|believed|thinks?)\b", re.IGNORECASE)
RULES = {"clause": CLAUSE, "talk": TALK}


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; code and links' targets are left out."""
    plain = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", plain))
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*|#>]", plain):
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\[])", " ".join(paragraph.split())):
            if len(sentence.split()) > 2:
                yield sentence.strip()


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) for every docstring of the package."""
    for path in sorted((ROOT / "kvproxy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                line = getattr(node, "lineno", 1)
                for sentence in sentences(ast.get_docstring(node) or ""):
                    yield f"{path.relative_to(ROOT)}:{line}", sentence


def pages() -> Iterator[tuple[str, str]]:
    """Yield (page, sentence) for the documentation that is written by hand."""
    generated = {"configuration.md", "metrics.md"}
    listed = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "kvproxy").rglob("README.md")),
    ]
    for path in sorted(listed):
        if path.name not in generated:
            for sentence in sentences(path.read_text()):
                yield str(path.relative_to(ROOT)), sentence


def find_broken(rule: str, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the sentences that break a rule, with their places."""
    return [(place, sentence) for place, sentence in found if RULES[rule].search(sentence)]


def main() -> None:
    """Print the shares, or with `--list` the sentences themselves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", choices=sorted(RULES))
    shown = parser.parse_args().list
    for name, source in SOURCES.items():
        found = list(source())
        for rule in RULES:
            wrong = find_broken(rule, found)
            print(f"{name}: {rule}: {len(wrong)} of {len(found)} sentences, {100 * len(wrong) / len(found):.1f} %")
            if shown == rule:
                print(*(f"  {place}: {sentence}" for place, sentence in wrong), sep="\n")


#: Texts that are counted, by name.
SOURCES = {"docstrings": docstrings, "docs": pages}

if __name__ == "__main__":
    main()
