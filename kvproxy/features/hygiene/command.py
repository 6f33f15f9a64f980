"""`kvproxy doctor --traffic`: the causes that break the prefixes of returning sessions."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from kvproxy.features.hygiene.traffic import rows_of, rows_of_receipts, traffic_report
from kvproxy.operate.commands.doctor import print_report
from kvproxy.operate.commands.operate import AdminAddress, AdminRefused, ask_admin
from kvproxy.operate.receipts.files import ReceiptReader


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
