"""Habits of the traffic, learned: which prompts begin sessions that come back, how soon, and how much longer. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import fmean

#: Gap between turns after which a session is no longer expected back.
HORIZON_S = 30.0
#: Until gaps are known.
_FIRST_LIMIT_S = 5.0
_LEAST_LIMIT_S = 2.0
#: Share of the turns that come within the limit.
_QUANTILE = 0.99
_GAPS = 256
_EVERY = 4  # gaps between two looks at them

#: Until growth is known.
_FIRST_GROWTH_TOKENS = 2500.0
_GROWTH_WEIGHT = 0.02

#: Beginnings of prompts that are remembered, and outcomes of each.
MAX_HEADS = 1024
_OUTCOMES = 32


class Habits:
    """Updated at every turn of every session."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, int]] = deque(maxlen=_GAPS)  # and the tokens that memory held meanwhile
        self._seen = 0
        #: Seconds without a turn after which a session gives up its room.
        self.idle_limit_s = _FIRST_LIMIT_S
        #: Seconds between an answer and the next turn, on average over the tokens of contexts.
        self.pause_s = 0.0
        #: Tokens by which a context grows in a turn, on average.
        self.growth_tokens = _FIRST_GROWTH_TOKENS
        #: Turns that another one followed, and last ones: of all, by beginning; of those without a tool call, by ~.
        self._heads: OrderedDict[int, list[int]] = OrderedDict()
        #: Of these, the beginnings of prompts most of which were followed by their session's next turn.
        self.returning: set[int] = set()

    def note_return(
        self, head: int, gap_s: float | None, tokens: int, growth_tokens: int, *, calls_tool: bool = True
    ) -> None:
        """Note the next turn of a session with a prompt of so many tokens, after an answer that called a tool or
        not. No gap is known of one that may have waited at another router."""
        self._note_outcome(head, 0)
        if not calls_tool:
            self._note_outcome(~head, 0)
        if gap_s is None:
            return
        self._seen += 1
        weight = max(_GROWTH_WEIGHT, 1.0 / self._seen)
        self.growth_tokens += weight * (max(0, growth_tokens) - self.growth_tokens)
        self._gaps.append((gap_s, tokens))
        if self._seen % _EVERY == 0:
            gaps, weights = zip(*sorted(self._gaps), strict=True)
            self.pause_s = fmean(gaps, weights)
            longest_s = gaps[min(len(gaps) - 1, int(_QUANTILE * len(gaps)))]
            self.idle_limit_s = min(HORIZON_S, max(_LEAST_LIMIT_S, longest_s))

    def note_last(self, head: int, *, calls_tool: bool = True) -> None:
        """Note a turn that none followed within the horizon."""
        self._note_outcome(head, 1)
        if not calls_tool:
            self._note_outcome(~head, 1)

    def ends_without_call(self, head: int) -> bool:
        """Return whether most answers without a tool call were the last of prompts that begin so."""
        return ~head in self._heads and ~head not in self.returning

    def _note_outcome(self, head: int, which: int) -> None:
        heads = self._heads
        found = heads.get(head)
        if found is None:
            found = heads[head] = [0, 0]
            if len(heads) > MAX_HEADS:
                self.returning.discard(heads.popitem(last=False)[0])
        found[which] += 1
        heads.move_to_end(head)
        if sum(found) > _OUTCOMES:
            found[:] = (found[0] // 2, found[1] // 2)
        if found[0] > found[1]:
            self.returning.add(head)
        else:
            self.returning.discard(head)
