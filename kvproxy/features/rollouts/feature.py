"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.features.rollouts.limits import ANSWER_S, CALL_S
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.operate.admin.operated import AdminTarget
    from kvproxy.operate.admin.replies import Audit


class Rollouts(Feature):
    """Has all engines of a cluster do one thing, and their caches forgotten where it empties them."""

    name = "rollouts"
    slow_changes = {"/call": CALL_S + ANSWER_S}

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/call` and `/flush`."""
        from kvproxy.features.rollouts.admin import RolloutRoutes

        return RolloutRoutes(operated, audit).list_routes()


FEATURE = Rollouts()
