"""Writes the files of names again: `python -m tests.golden`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.golden.answers import ON, collect_answers
from tests.golden.names import FILES

FOLDER = Path(__file__).parent


def _write(name: str, names: set[str]) -> None:
    (FOLDER / f"{name}.txt").write_text("".join(f"{one}\n" for one in sorted(names)))


if __name__ == "__main__":
    for name, collect in FILES.items():
        _write(name, set(collect()))
    for name, settings in (("answers_off", {}), ("answers_on", ON)):
        _write(name, asyncio.run(collect_answers(**settings)))
