"""Effects of the traffic itself on prefixes: findings from a running proxy's counts, or from receipts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvproxy.features.hygiene.causes import ADVICE, Cause
from kvproxy.features.hygiene.note import NOTE, PrefixBreak
from kvproxy.operate.doctor.report import DoctorReport, Finding, Severity
from kvproxy.operate.receipts.receipt import Receipt, note_of
from kvproxy.proxy.filters.access_log import printable

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
