"""Whether an answer ends in calls of tools, read from it as it passes."""

from __future__ import annotations

import re

_finished = re.compile(rb'"(?:finish|stop)_reason"\s?:\s?"tool_(?:calls|use)"').search
_item = re.compile(rb'"type"\s?:\s?"(?:function_call|custom_tool_call|local_shell_call|computer_call)"').search


class PendingCall:
    """Of one answer. What is looked for cannot be in generated text, whose quotes are escaped; what the network cut in
    two goes unseen. Items of Responses count at once: at the end these give no reason but that they are complete."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = False

    def read_piece(self, piece: bytes) -> None:
        """The answer passes."""
        if (b'"tool_' in piece and _finished(piece)) or (b'_call"' in piece and _item(piece)):
            self.found = True
