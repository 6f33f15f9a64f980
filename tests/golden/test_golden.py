"""Names that users rely on stay, wherever the code behind them goes."""

from __future__ import annotations

import pytest

from tests.golden.__main__ import FOLDER
from tests.golden.answers import ON, collect_answers
from tests.golden.names import FILES


def written(name: str) -> set[str]:
    return set((FOLDER / f"{name}.txt").read_text().splitlines())


def compare(found: set[str], name: str) -> None:
    """Compare as sets, without order."""
    gone, new = sorted(written(name) - found), sorted(found - written(name))
    assert not gone, f"{name}: gone, although users rely on them"
    assert not new, f"{name}: new; `python -m tests.golden` writes them down"


@pytest.mark.parametrize("name", FILES)
def test_names_of_the_program_stay(name: str) -> None:
    """Metrics with labels, settings with defaults, arguments of commands, headers, routes, fields of receipts."""
    compare(set(FILES[name]()), name)


async def test_answers_with_every_capability_off_keep_their_keys() -> None:
    """Of the admin listener, with the default configuration."""
    compare(await collect_answers(), "answers_off")


async def test_answers_with_every_capability_on_keep_their_keys() -> None:
    """The same with what can be turned on without another program."""
    compare(await collect_answers(**ON), "answers_on")
