"""`kvproxy explain`: one request's receipt in words."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from kvproxy.filters.access_line import printable
from kvproxy.receipts.explain import explain
from kvproxy.receipts.reading import Reading
from kvproxy.receipts.receipt import encode


def run(request_id: str, *, file: Path, as_json: bool, out: TextIO, err: TextIO) -> int:
    """0 when there is a receipt, 1 when not. OSError when the file cannot be read."""
    found = Reading(file).find(request_id)
    if not found:
        print(f"kvproxy explain: no receipt of {printable(request_id)} in {file}", file=err)
        return 1
    newest = found[0]
    print(encode(newest).decode().rstrip() if as_json else explain(newest), file=out)
    if len(found) > 1:
        print(f"{len(found) - 1} earlier request(s) had the same id", file=err)
    return 0
