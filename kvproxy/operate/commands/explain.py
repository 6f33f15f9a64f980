"""`kvproxy explain`: one request in words, from its receipt or from what a running proxy remembers."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from kvproxy.operate.commands.operate import AdminAddress, AdminRefused, ask_admin
from kvproxy.operate.log_lines import printable
from kvproxy.operate.receipts.explain import explain_decision, explain_receipt
from kvproxy.operate.receipts.files import Ambiguous, ReceiptReader
from kvproxy.operate.receipts.receipt import Receipt, encode_receipt

DEFAULT_FILE = "receipts.jsonl"


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """Request to explain (its id, or the beginning of it) and where to look: without `file` ./receipts.jsonl, then the
    proxy."""

    request_id: str
    file: Path | None
    address: AdminAddress
    as_json: bool = False


def main(args: argparse.Namespace) -> int:
    """`kvproxy explain`."""
    address = AdminAddress(args.url, args.token_file)
    options = ExplainOptions(args.request_id, args.file, address, args.json)
    return run(options, out=sys.stdout, err=sys.stderr)


def run(options: ExplainOptions, *, out: TextIO, err: TextIO, transport: httpx.BaseTransport | None = None) -> int:
    """0 when the request is known, 1 when not. OSError when a file that was named cannot be read."""
    wanted = options.request_id.rstrip("….")
    file = options.file or Path(DEFAULT_FILE)
    try:
        found = ReceiptReader(file).find_receipts(wanted) if options.file is not None or file.exists() else []
        if found:
            _print_receipts(found, as_json=options.as_json, out=out, err=err)
            return 0
        if options.file is not None:
            print(f"kvproxy explain: no receipt of {printable(wanted)} in {file}", file=err)
            return 1
        decision = _remembered(wanted, options.address, transport)
    except (AdminRefused, Ambiguous) as error:
        looked = "" if isinstance(error, Ambiguous) else f"no receipt of {printable(wanted)} in ./{file}, and "
        print(f"kvproxy explain: {looked}{error}", file=err)
        return 1
    print(json.dumps(decision) if options.as_json else explain_decision(decision), file=out)
    return 0


def _print_receipts(found: list[Receipt], *, as_json: bool, out: TextIO, err: TextIO) -> None:
    newest = found[0]
    print(encode_receipt(newest).decode().rstrip() if as_json else explain_receipt(newest), file=out)
    if len(found) > 1:
        print(f"{len(found) - 1} earlier request(s) had the same id", file=err)


def _remembered(wanted: str, address: AdminAddress, transport: httpx.BaseTransport | None) -> dict[str, Any]:
    """Return the newest decision with this id. Raises AdminRefused if the proxy no longer has it."""
    with address.connect(transport=transport) as client:
        answer = ask_admin(client, address.url, "/decisions?limit=1000")
    decisions = [one for one in answer.get("decisions", ()) if isinstance(one.get("request_id"), str)]
    exact = [one for one in decisions if one["request_id"] == wanted]
    starting = [one for one in decisions if one["request_id"].startswith(wanted)]
    ids = dict.fromkeys(one["request_id"] for one in starting)
    if not exact and len(ids) > 1:
        raise Ambiguous(list(ids))
    if not starting:
        raise AdminRefused(f"the proxy at {address.url} no longer has it (it keeps the last 1,000 requests)")
    found: dict[str, Any] = (exact or starting)[0]
    return _with_candidates(found, address, transport)


def _with_candidates(
    decision: dict[str, Any], address: AdminAddress, transport: httpx.BaseTransport | None
) -> dict[str, Any]:
    """Return the same decision with what each candidate would have cost, unless the proxy has forgotten it
    meanwhile."""
    with address.connect(transport=transport) as client, contextlib.suppress(AdminRefused):
        return ask_admin(client, address.url, f"/decisions/{decision['number']}")
    return decision
