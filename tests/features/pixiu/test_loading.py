"""The translation is imported for a file of Pixiu alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOAD = """
import sys
from kvproxy.operate.config.load import check_config
check_config("endpoints: [http://127.0.0.1:8000]")
assert "kvproxy.features.pixiu.load" not in sys.modules
check_config("static_resources: {}")
assert "kvproxy.features.pixiu.load" in sys.modules
"""


@pytest.mark.slow
def test_a_native_file_imports_no_other_dialect() -> None:
    """In a process of its own."""
    subprocess.run([sys.executable, "-c", _LOAD], check=True, timeout=60)
