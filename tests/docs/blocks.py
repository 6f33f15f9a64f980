"""Every code block of the documentation."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "samples").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "benchmarks" / "traces").rglob("*.md")),
    *sorted((ROOT / "kvproxy").rglob("README.md")),
]
_BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """Text between two fences; `where` is page and line for people."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Those of these languages, or all."""
    found = [block for page in PAGES for block in _blocks(page)]
    return [block for block in found if not languages or block.language in languages]


def block(page: str, containing: str) -> str:
    """Return the text of the one block of a page that contains something."""
    (found,) = [block.text for block in blocks() if block.page == page and containing in block.text]
    return found


def inline(first_word: str) -> list[tuple[str, str]]:
    """Page and text of what stands in backquotes within sentences and begins with this word."""
    found = []
    for page in PAGES:
        prose = _BLOCK.sub("", page.read_text())
        found += [(str(page.relative_to(ROOT)), text) for text in _INLINE.findall(prose)]
    return [(page, text) for page, text in found if text.split()[:1] == [first_word] and " " in text]


@cache
def _blocks(page: Path) -> tuple[Block, ...]:
    return tuple(_find_blocks(page))


def _find_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, match[2], textwrap.dedent(match[3]))
