"""Reports of engines about prompts with media: by which names they know the blocks behind the first medium."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvproxy.base.types import EndpointId
from kvproxy.cache.media.cut import Medium


class ReportedBeginning(NamedTuple):
    """Leading blocks of a prompt as engines name them: our hashes of these."""

    block_size: int
    hashes: array[int]
    prompt_tokens: int  # of the prompt they were learned from, or of its beginning
    whole: bool = False  # they are all of this prompt's blocks

    @property
    def tokens(self) -> int:
        return self.block_size * len(self.hashes)


class ServedPrompt(NamedTuple):
    """A prompt with media that an engine has computed."""

    model: str
    keys: Sequence[int]  # one a message prefix
    hashes: array[int]  # of its text blocks
    media: tuple[Medium, ...]
    text_blocks: Callable[[int], array[int]]  # by block size: the blocks of its known beginning, of text
    prompt_tokens: int
    noted: int  # events with media when it was routed


class MediaReports:
    """Beginnings of prompts with media that one cluster's engines reported. This one learns none."""

    def __init__(self) -> None:
        #: Called with the model, a medium and its placeholder tokens.
        self.on_counted: Callable[[str, Medium, int], None] = lambda model, medium, tokens: None

    @property
    def noted(self) -> int:
        """Reports with media until now."""
        return 0

    def follow_software(self, engines: Iterable[str | None]) -> bool:
        """Return whether these engines are of one version, which call a picture alike."""
        return False

    def find_beginning(
        self, keys: Sequence[int], hashes: Sequence[int], media: Sequence[Medium]
    ) -> ReportedBeginning | None:
        """Return the longest known beginning of a prompt."""
        return None

    def note_served(self, endpoint: EndpointId, served: ServedPrompt) -> None:
        """Learn from a prompt that the endpoint has computed, now or once its reports come."""

    def forget(self, keys: Sequence[int], hashes: Sequence[int], media: Sequence[Medium], model: str) -> None:
        """Forget a prompt whose reuse contradicted the prediction."""
