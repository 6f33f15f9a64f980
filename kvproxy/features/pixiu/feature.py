"""The feature, as the core meets it."""

from __future__ import annotations

from kvproxy.operate.feature import Feature


class PixiuFeature(Feature):
    """Loads configurations of Dubbo-go-Pixiu as they are."""

    name = "pixiu"


FEATURE = PixiuFeature()
