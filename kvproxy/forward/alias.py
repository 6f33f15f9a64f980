"""Replaces the model name in a body without touching a byte of anything else."""

from __future__ import annotations

import asyncio

from kvproxy import json_scan


async def with_model(body: bytes, model: str, *, named: str, pace: asyncio.Lock) -> bytes:
    """`body` (a JSON object) with its top-level `model`, which is `named`, replaced; scanned in steps if it is long.

    A body that is not a JSON object is returned as it is: the engine's own error is what the client should see.
    """
    replaced = json_scan.replace_model(body, model, named=named)
    if replaced is not None:
        return replaced
    try:
        return await json_scan.run_in_turns(json_scan.scan_to_replace_model(body, model), pace)
    except json_scan.Unreadable:
        return body
