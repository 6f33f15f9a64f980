"""A feature with the members that all rooms ask for: what authors of features start from (docs/contributing)."""

from __future__ import annotations

from kvproxy.base.feature import BaseFeature


class Feature(BaseFeature):
    """One optional capability: a folder, its line in `kvproxy/features/__init__.py`, and nothing anywhere else."""
