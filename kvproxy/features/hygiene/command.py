"""`kvproxy doctor --traffic`: the causes that break the prefixes of returning sessions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from kvproxy.features.hygiene.comparison import ADVICE, Cause
from kvproxy.features.hygiene.note import NOTE, PrefixBreak
from kvproxy.operate.commands.doctor import print_report
from kvproxy.operate.commands.operate import AdminAddress, AdminRefused, ask_admin
from kvproxy.operate.doctor.report import DoctorReport, Finding, Severity
from kvproxy.operate.log_lines import printable
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import Receipt, note_of

CHECK = "prefixes"


@dataclass(slots=True)
class Row:
    """Breaks of one cause, client and tenant; `part` and `request_id` are of the latest."""

    cause: Cause
    client: str
    tenant: str
    breaks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    part: str = ""
    request_id: str = ""


def rows_of(answer: Mapping[str, Any]) -> list[Row]:
    """Return the rows of an answer of `/cache/breaks`, without causes unknown to this version."""
    return [
        Row(Cause(one["cause"]), *(one[name] for name in Row.__slots__[1:]))
        for one in answer["causes"]
        if one["cause"] in ADVICE
    ]


def rows_of_receipts(receipts: Iterable[Receipt]) -> tuple[list[Row], int]:
    """Return the same of receipts, the oldest first, and how many of these were of a session that returned."""
    rows: dict[tuple[str, str, str], Row] = {}
    seen: set[str] = set()
    returned = 0
    for receipt in receipts:
        returned += receipt.session in seen
        if receipt.session:
            seen.add(receipt.session)
        found = note_of(receipt, NOTE, PrefixBreak)
        if found is None or found.cause not in ADVICE:
            continue
        key = (found.cause, receipt.client, receipt.tenant)
        row = rows.setdefault(key, Row(Cause(found.cause), receipt.client, receipt.tenant))
        row.breaks += 1
        row.tokens += found.tokens
        row.seconds += found.seconds or 0.0
        row.part = found.part
        row.request_id = receipt.request_id
    return sorted(rows.values(), key=lambda row: -row.tokens), returned


def traffic_report(rows: Sequence[Row], returned: int) -> DoctorReport:
    """Return a warning for each row, the dearest first. `returned`: turns that were compared with the one before."""
    if not returned:
        what = "no session has returned yet: nothing to compare (sessions are named by their key, prompts from 4 KB on)"
        return DoctorReport.of_findings([Finding(Severity.OK, "traffic", what, check=CHECK)])
    broken = sum(row.breaks for row in rows)
    good = Finding(
        Severity.OK,
        "traffic",
        f"{max(0, returned - broken):,} of {returned:,} returning turns were reused as far as their last prompt went",
        check=CHECK,
    )
    return DoctorReport.of_findings([good, *map(_finding, rows)])


def _finding(row: Row) -> Finding:
    what, fix = ADVICE[row.cause]
    cost = f"{row.tokens:,} tokens" + (f", {row.seconds:,.1f} s of prefill" if row.seconds else "")
    where = f"client {row.client or 'unknown'}" + (f", tenant {printable(row.tenant)}" if row.tenant else "")
    text = (
        f"{row.cause}: {what}: {row.breaks:,} times, {cost} again; "
        f"latest: {row.part}, request {printable(row.request_id)}"
    )
    return Finding(Severity.WARNING, where, text, fix, check=CHECK)


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Of `--traffic`: the running proxy to ask, or the receipts to read instead."""

    address: AdminAddress
    receipts: Path | None = None
    as_json: bool = False
    strict: bool = False


def main(args: argparse.Namespace) -> int:
    """`kvproxy doctor --traffic`."""
    address = AdminAddress(args.url, args.token_file)
    asked = TrafficOptions(address, args.receipts, args.json, args.strict)
    return print_traffic(asked, out=sys.stdout, err=sys.stderr)


def print_traffic(
    options: TrafficOptions, *, out: TextIO, err: TextIO, transport: httpx.BaseTransport | None = None
) -> int:
    """Print what breaks prefixes; 0, 1 when there is nothing to read, 2 for warnings with `strict`."""
    try:
        if options.receipts is not None:
            rows, returned = rows_of_receipts(ReceiptReader(options.receipts).oldest_first())
        else:
            with options.address.connect(transport=transport) as client:
                answer = ask_admin(client, options.address.url, "/cache/breaks")
            rows = rows_of(answer)
            returned = answer["returned"]
    except (AdminRefused, OSError) as error:
        print(f"kvproxy doctor --traffic: {error}", file=err)
        return 1
    report = traffic_report(rows, returned)
    print_report(report, out, as_json=options.as_json, verbose=True)
    return report.exit_status(strict=options.strict)
