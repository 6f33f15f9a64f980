"""Synthetic prompts with a trace's block structure: equal block ids are equal text, different ids never are."""

from __future__ import annotations

from kvproxy.replay.trace import Turn

#: Common English words, each one token (with its space) to most tokenizers.
_WORDS = (  # noqa: SIM905 - a list literal would be 60 lines
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
).split()


def prompt_text(turn: Turn, block_size: int) -> str:
    """About `turn.prompt_tokens` tokens: a text for each whole block, then a tail no other request has."""
    pieces = [block_text(block, block_size) for block in turn.blocks]
    rest = turn.prompt_tokens - len(turn.blocks) * block_size
    if rest > 0:
        last = turn.blocks[-1] if turn.blocks else 0
        pieces.append(block_text((last << 20) + turn.prompt_tokens, rest))
    return " ".join(pieces)


def block_text(block: int, tokens: int) -> str:
    """The same words for the same block, its id spelled out first so that no two blocks are alike."""
    base = len(_WORDS)
    state, digits, left = block, [], block
    while left:
        digits.append(left % base)
        left //= base
    words = [_WORDS[digit] for digit in (len(digits), *digits)]  # no id's spelling begins another's
    while len(words) < tokens:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(_WORDS[(state >> 33) % base])
    return " ".join(words[: max(1, tokens)])
