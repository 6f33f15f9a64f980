"""Where the rest of an answer joins the part before it: the overlap must come out the same, and counts are mended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.plan import Plan, count_ids
from kvproxy.features.resume.progress import Progress


class Splice:
    """One leg after the first. It moves the progress on from the place where the leg begins."""

    def __init__(self, plan: Plan, progress: Progress, *, greedy: bool) -> None:
        self.plan = plan
        self.began = False  # a part of the answer came that is new
        self.new_ids: Sequence[int] = ()  # of the last chunk, those that the client has not got
        self._progress = progress
        self._delivered = progress.text
        self._at = plan.place.chars
        progress.cut(plan.place.tokens, again=plan.by_ids and greedy)
        if not plan.by_ids and plan.place.tokens:
            progress.ids_known = False

    def take(self, text: str, ids: Sequence[int] | None, *, last: bool = False) -> str:
        """Return the new part of a chunk's text. Raises Mismatch."""
        if self.plan.spent:  # what an engine adds to a whole answer is no part of it
            self.began = self.began or last
            return ""
        self.new_ids = self._check_ids(ids or ())
        delivered = self._delivered
        start = self._at
        self._at += len(text)
        old = delivered[start : self._at]
        if not text.startswith(old):
            raise Mismatch("its last words came out differently")
        if last and self._at < len(delivered):
            raise Mismatch("it ended before the words that had come")
        new = text[len(old) :]
        self._progress.add(new, ids, mark=self._at if text and self._at <= len(delivered) else None)
        if self._progress.obstacle == "too_long":
            raise Mismatch("it is too long to be kept")
        self.began = self.began or bool(new)
        return new

    def _check_ids(self, ids: Sequence[int]) -> Sequence[int]:
        """Return those behind the tokens that have to come out the same once more."""
        again = self._progress.again
        expected = again[: len(ids)]
        if list(ids[: len(expected)]) != expected:
            raise Mismatch("its last tokens came out differently")
        del again[: len(ids)]
        return ids[len(expected) :]

    def join_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the counts of both legs of a chat or text completion as those of one request."""
        prompt = self.count_prompt(usage.get("prompt_tokens"))
        completion = self.count_output(usage.get("completion_tokens"))
        joined = {**usage, "prompt_tokens": prompt, "completion_tokens": completion}
        joined["total_tokens"] = prompt + completion
        if "prompt_tokens_details" in usage and self.plan.grade != "restart":
            joined["prompt_tokens_details"] = self._progress.cached_details
        return joined

    def count_prompt(self, leg_tokens: object) -> int:
        """Return the tokens of the request's prompt; the leg's has the beginning of the answer, too."""
        progress = self._progress
        if progress.prompt_tokens is not None:
            return progress.prompt_tokens
        if progress.prompt_ids:
            return count_ids(progress.prompt_ids)
        return max(0, leg_tokens - self.plan.kept_tokens) if isinstance(leg_tokens, int) else 0

    def count_output(self, leg_tokens: object) -> int:
        """Return the tokens of the whole answer."""
        kept = self.plan.kept_tokens
        return kept + leg_tokens if isinstance(leg_tokens, int) and not self.plan.spent else kept
