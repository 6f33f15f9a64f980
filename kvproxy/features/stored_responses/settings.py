"""Settings of stored responses."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Model, Size


class StoredResponsesSettings(Model):
    """Answers of `/v1/responses`, kept by the proxy so that any engine may go on from them. Prompts and answers lie in
    the folder as text."""

    path: str = Field(min_length=1)
    """Folder for them, which the proxy may write to; workers and replicas that share it go on from each other's."""
    max_bytes: Size = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Of all answers together; the longest unused go first. Each is kept for a day after its last use."""
