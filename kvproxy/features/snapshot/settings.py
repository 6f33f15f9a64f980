"""Settings of the snapshot."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Model, Size

#: An older file is not used: the engines have evicted much of its contents.
MAX_AGE_S = 3600.0


class SnapshotSettings(Model):
    """State of the proxy, kept in a file over a restart: routed prompts, learned speeds and prompt lengths.

    Hashes and numbers, no text and no tokens. Off without a path."""

    retired = {"max_age": "a file is used for an hour", "interval": "it is written every minute"}

    path: str = ""
    """File to keep, one for each proxy, in a folder the proxy may write to; empty: no snapshot. It is written every
    minute and at the end."""
    max_bytes: Size = Field(default=64 * 1024 * 1024, ge=4096)
    """Largest file (a little over 8 bytes for each 256 bytes of prompt); the least recently requested entries are left
    out."""


class SnapshotPlace(Model):
    """The section that the `kvcache` filter gets."""

    snapshot: SnapshotSettings = SnapshotSettings()
    """Warm restart."""
