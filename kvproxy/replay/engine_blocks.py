"""A trace as engines see it: prompts in their own blocks, and what an answer leaves behind for the next turn."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import chain

from kvproxy.replay.trace import Trace, TraceError, Turn


class EngineBlocks:
    """Turns in blocks of `block_size` tokens, of which a trace's block is a multiple; 0: in the trace's own.

    Of a prompt's last tokens, which fill no block of the trace, nothing is known, in smaller blocks either. With
    `reuse_outputs` an answer's blocks are found by the next turn, as engines do that hash what they generate.
    """

    def __init__(self, trace: Trace, block_size: int = 0, *, reuse_outputs: bool = False) -> None:
        self.trace = trace
        self.size = block_size or trace.block_size
        self._reuse_outputs = reuse_outputs
        self._parts, rest = divmod(trace.block_size, self.size)
        if rest or not self._parts:
            whole = trace.block_size
            raise TraceError(f"{trace.name}: its blocks of {whole} tokens are not made of {block_size} each")

    def turn(self, session: int, number: int) -> Turn:
        """One turn in the engines' blocks."""
        return self.split(self.trace.sessions[session].turns[number])

    def split(self, turn: Turn) -> Turn:
        """A turn in the engines' blocks. Made when it is played: a long one has thousands of them."""
        if self._parts == 1:
            return turn
        parts = (range(block * self._parts, (block + 1) * self._parts) for block in turn.blocks)
        return replace(turn, blocks=array("Q", chain.from_iterable(parts)))

    def left_by(self, session: int, number: int) -> array[int]:
        """Blocks of a turn once it is answered: those of its prompt and, where the next turn's prompt goes on from it
        and is long enough to hold the answer, those it shares with that. (A trace does not say what is in a prompt: the
        answer is taken to come next, as in a chat's history.)"""
        turns, turn = self.trace.sessions[session].turns, self.turn(session, number)
        computed = turn.prompt_tokens + turn.output_tokens - 1  # the last token's KV is never needed
        if not self._reuse_outputs or number + 1 == len(turns) or turns[number + 1].prompt_tokens <= computed:
            return turn.blocks
        following = self.turn(session, number + 1).blocks[: computed // self.size]
        return following if following[: len(turn.blocks)] == turn.blocks else turn.blocks
