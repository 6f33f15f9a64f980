"""Where the rest of an answer joins the part before it: the overlap must come out the same, and counts are mended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproxy.base.errors import EngineReportedError
from kvproxy.features.resume.plan import Plan, count_ids
from kvproxy.features.resume.progress import Progress

_CONFLICT = 409


class Mismatch(EngineReportedError):
    """The rest does not continue the answer; no engine is to blame."""

    reason = "resume_mismatch"

    def __init__(self, what: str) -> None:
        super().__init__(f"another engine did not continue the answer: {what}", status=_CONFLICT)


class Splice:
    """One leg after the first. It moves the progress on from the place where the leg begins."""

    def __init__(self, plan: Plan, progress: Progress, *, greedy: bool) -> None:
        self.plan = plan
        self.new_text = False  # came already
        self._progress = progress
        self._delivered = progress.text
        self._at = plan.place.chars
        self._kept_tokens = plan.place.tokens
        expected = progress.cut(plan.place.tokens)
        self._expected = expected if plan.by_ids and greedy else []
        if not plan.by_ids and plan.place.tokens:
            progress.ids_known = False

    def take(self, text: str, ids: Sequence[int] | None, *, last: bool = False) -> str:
        """Return the new part of a chunk's text. Raises Mismatch."""
        if ids:
            self._check_ids(ids)
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
        self.new_text = self.new_text or bool(new)
        return new

    def _check_ids(self, ids: Sequence[int]) -> None:
        expected = self._expected[: len(ids)]
        if list(ids[: len(expected)]) != expected:
            raise Mismatch("its last tokens came out differently")
        del self._expected[: len(ids)]

    def join_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the counts of both legs as those of one request."""
        progress = self._progress
        leg_prompt = usage.get("prompt_tokens")
        prompt = progress.prompt_tokens
        if prompt is None and progress.prompt_ids:
            prompt = count_ids(progress.prompt_ids)
        if prompt is None and isinstance(leg_prompt, int):
            prompt = max(0, leg_prompt - self._kept_tokens)
        completion = self._kept_tokens + (usage.get("completion_tokens") or 0)
        mended = {**usage, "prompt_tokens": prompt, "completion_tokens": completion}
        mended["total_tokens"] = (prompt or 0) + completion
        if "prompt_tokens_details" in usage and self.plan.grade != "restart":
            mended["prompt_tokens_details"] = progress.cached_details
        return mended
