"""Detection of answers that end in tool calls, while they pass."""

from __future__ import annotations

import re

_finished = re.compile(rb'"(?:finish|stop)_reason"\s?:\s?"tool_(?:calls|use)"').search
_item = re.compile(rb'"type"\s?:\s?"(?:function_call|custom_tool_call|local_shell_call|computer_call)"').search


class ToolCallDetector:
    """Detector for one answer. The searched texts cannot be in generated text, whose quotes are escaped; one split by
    the network goes unseen. Items of Responses count at once: their end gives no other reason than that they are
    complete."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = False

    def read_piece(self, piece: bytes) -> None:
        """Read a piece of the answer."""
        if (b'"tool_' in piece and _finished(piece)) or (b'_call"' in piece and _item(piece)):
            self.found = True
