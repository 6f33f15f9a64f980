"""`kvproxy ledger`: what each tenant had of each model, from the ledger's files."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from kvproxy.features.ledger.ledger import LedgerReader, LedgerSum
from kvproxy.operate.log_lines import align_columns, printable

#: Beginnings of a formula in spreadsheets.
_FORMULA = ("=", "+", "-", "@", "\t")
_HEADER = ("tenant", "model", "requests", "uncached", "cached", "output", "price")


def main(args: argparse.Namespace) -> int:
    """`kvproxy ledger`."""
    return run(args.file, since=args.since, until=args.until, form=args.form or "", out=sys.stdout, err=sys.stderr)


def run(file: Path, *, since: datetime | None, until: datetime | None, form: str, out: TextIO, err: TextIO) -> int:
    """0 where there is a ledger, 1 where not. `form`: json, csv, or "" for people."""
    reader = LedgerReader(file)
    try:
        sums = reader.read(since=since, until=until)
    except OSError as error:
        print(f"kvproxy ledger: {file}: {error.strerror or 'no ledger there'}", file=err)
        return 1
    ordered = sorted(sums.items(), key=lambda row: (-row[1].price, -row[1].uncached, row[0]))
    rows = [{"tenant": tenant, "model": model, **asdict(one)} for (tenant, model), one in ordered]
    if form == "csv":
        _print_csv(rows, out)
        return 0
    if form == "json":
        print(json.dumps({"rows": rows, "broken_lines": reader.broken}), file=out)
        return 0
    table = [_HEADER, *(_row(tenant, model, one) for (tenant, model), one in ordered)]
    print(*align_columns(table, left=2), sep="\n", file=out)
    uncounted, unpriced = (sum(getattr(one, name) for one in sums.values()) for name in ("uncounted", "unpriced"))
    if unpriced:
        print(f"{unpriced} without a price, {uncounted} of them without the engine's count", file=out)
    if predicted := sum(one.predicted for one in sums.values()):
        print(f"{predicted:,} cached tokens as predicted, where no engine counted them", file=out)
    if reader.broken:
        print(f"kvproxy ledger: {reader.broken} lines cannot be read", file=err)
    return 0


def _row(tenant: str, model: str, one: LedgerSum) -> tuple[str, ...]:
    counts = (one.requests, one.uncached, one.cached, one.output)
    return (printable(tenant) or "-", printable(model) or "-", *(f"{each:,}" for each in counts), f"{one.price:.4f}")


def _print_csv(rows: list[dict[str, Any]], out: TextIO) -> None:
    """Print rows as CSV. A client chooses the name of its model, so none may become a formula."""
    table = csv.DictWriter(out, ["tenant", "model", *(field.name for field in fields(LedgerSum))], lineterminator="\n")
    table.writeheader()
    for row in rows:
        names = {key: printable(row[key]) for key in ("tenant", "model")}
        plain = {key: f"'{name}" if name.startswith(_FORMULA) else name for key, name in names.items()}
        table.writerow({**row, **plain})
