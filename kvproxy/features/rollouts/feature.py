"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.features.rollouts.times import ANSWER_S, CALL_S
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.runtime.operated import AdminTarget


class Rollouts(Feature):
    """Has all engines of a cluster do one thing, and their caches forgotten where it empties them."""

    name = "rollouts"
    slow_changes = {"/call": CALL_S + ANSWER_S, "/flush": CALL_S + ANSWER_S}  # both may ask every engine

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/call` and `/flush`."""
        from kvproxy.features.rollouts.admin import RolloutRoutes

        return RolloutRoutes(operated, audit).list_routes()


FEATURE = Rollouts()
