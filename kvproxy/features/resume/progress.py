"""The part of an answer that has come: text, token ids, and places where both are known."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

#: A longer answer is not resumed.
MAX_CHARS = 4 * 1024 * 1024
MAX_TOKENS = 1024 * 1024
#: Last places kept, one a chunk with text.
_MARKS = 128


class Mark(NamedTuple):
    """A place between two tokens: so many tokens and characters of the answer are before it. `whole`: the last of
    these tokens ends a character, as text came with it alone."""

    tokens: int
    chars: int
    whole: bool = True


START = Mark(0, 0)


class Progress:
    """An answer with one choice, as far as it has come."""

    def __init__(self) -> None:
        self.head = b""  # data of its first event
        self.prompt_ids = b""  # a JSON array; b"": unknown
        self.prompt_tokens: int | None = None
        self.cached_details: object = None  # as the first engine reported them
        self.ids: list[int] = []
        self.ids_known = True  # of every token so far
        self.ids_wanted = False  # by the client, too
        self.again: list[int] = []  # tokens whose text came, and that have to come out the same once more
        self.ends: list[int] = []  # of the chunks that came, in tokens
        self.call_ids: list[str] = []  # of the tool calls that began
        self.tokens = 0
        self.chars = 0
        self.marks: deque[Mark] = deque(maxlen=_MARKS)
        self.role_sent = False
        self.thinking = False  # its last text was reasoning
        self.reasoned = False
        self.tools = False  # a tool call has begun
        self.obstacle = ""  # why it cannot be resumed, whatever the request
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Plain content delivered."""
        whole = "".join(self._parts)
        self._parts = [whole] if whole else []
        return whole

    @property
    def empty(self) -> bool:
        """True if the client has nothing but the beginning of an answer."""
        return not (self.chars or self.tools or self.reasoned)

    def add(self, text: str, ids: Sequence[int] | None, *, mark: int | None = None) -> None:
        """Add the tokens of one chunk and the text that went to the client; `mark` is the place in the text behind
        these tokens, if it is not the end."""
        if self.obstacle:
            return
        if ids:
            self.ids += ids
            self.tokens += len(ids)
            if self.tokens > (self.ends[-1] if self.ends else 0):
                self.ends.append(self.tokens)
        elif text:
            self.ids_known = False
            self.tokens += 1
        if text:
            self._parts.append(text)
            self.chars += len(text)
            self.thinking = False
        if text or mark is not None:
            self.marks.append(Mark(self.tokens, self.chars if mark is None else mark, len(ids or ()) < 2))
        if self.chars > MAX_CHARS or self.tokens > MAX_TOKENS:
            self.obstacle = "too_long"
            self.ids = []
            self.ends = []
            self._parts = []
            self.prompt_ids = b""

    def think(self, *, ids_known: bool) -> None:
        """Note a chunk of reasoning; its tokens, and text behind it, are added afterwards."""
        self.thinking = self.reasoned = True
        self.ids_known = self.ids_known and ids_known

    def cut(self, tokens: int, *, again: bool) -> None:
        """Forget the tokens behind a place; the text stays. `again`: these tokens must come out once more."""
        if again:
            self.again = self.ids[tokens:] + self.again
        else:
            self.again = []
            del self.ends[bisect_right(self.ends, tokens) :]
        del self.ids[tokens:]
        self.tokens = tokens
        self.marks = deque((mark for mark in self.marks if mark.tokens <= tokens), _MARKS)
