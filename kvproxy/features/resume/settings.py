"""Settings of resumed streams."""

from __future__ import annotations

from enum import StrEnum

from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.cluster.settings import RouteSettings


class Grade(StrEnum):
    """How a stream whose engine failed may go on."""

    OFF = "off"
    EXACT = "exact"  # by the token ids of prompt and answer
    TEXT = "text"  # by these where they are known, else by the answer's text


class ResumePlace(Model):
    """Keys that each route gets."""

    resume: Grade = Grade.OFF
    """Streams whose engine fails go on with another one: `exact` only by token ids, which vLLM reports; `text` also by
    the text so far, for models that `kvproxy doctor` finds fit for it; `off` ends them with an error event."""
    resume_best_effort: bool = False
    """Resume requests with penalties, a seed, or stop strings while sampling too, and by text those with a limit whose
    tokens cannot be counted: the rest may differ from that of an undisturbed run, or exceed the limit."""


SETTINGS = FeatureSettings(fields={RouteSettings: (ResumePlace,)})
