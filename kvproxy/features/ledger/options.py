"""The command `kvproxy ledger`, as its help shows it."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from kvproxy.operate.commands.options import Command


def add_options(ledger: argparse.ArgumentParser) -> None:
    """Add the file, days and formats."""
    ledger.add_argument("file", type=Path, metavar="FILE", help="`ledger.path`; rotated files and other workers' too")
    ledger.add_argument("--since", type=_day, metavar="DAY", help="what ended from then on, e.g. 2026-11-01 (UTC)")
    ledger.add_argument("--until", type=_day, metavar="DAY", help="and before then")
    form = ledger.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="one JSON object")
    form.add_argument("--csv", dest="form", action="store_const", const="csv", help="comma-separated, with a header")


def _day(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a day such as 2026-11-01, or a time of one, not {text!r}") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


COMMANDS = (
    Command(
        name="ledger",
        group="Study",
        help="tokens and prices by tenant and model, from the ledger's files",
        examples=("kvproxy ledger ledger.jsonl --since 2026-11-01 --csv",),
        add_options=add_options,
        run="kvproxy.features.ledger.command:main",
    ),
)
