"""Error of a rest that is another answer's."""

from __future__ import annotations

from kvproxy.base.errors import EngineReportedError

_CONFLICT = 409


class Mismatch(EngineReportedError):
    """The rest does not continue the answer; no engine is to blame. `refusal`: why, a label."""

    reason = "resume_mismatch"

    def __init__(self, what: str, *, refusal: str = "overlap") -> None:
        super().__init__(f"another engine did not continue the answer: {what}", status=_CONFLICT)
        self.refusal = refusal
