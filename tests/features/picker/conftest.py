"""These tests speak gRPC: the development group has what they need."""

import pytest

pytest.importorskip("hpack", reason="needs `pip install --group dev`: the extra `picker` is not installed")
