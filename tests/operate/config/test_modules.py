"""Modules that reading a configuration loads: it is what every command waits for first."""

from __future__ import annotations

import subprocess
import sys

from kvproxy.features import SHIPPED

#: Of all, without `__init__` files, which are empty.
MOST = 50
#: Of the rooms below the features. Nothing is added here.
MOST_OF_THE_CORE = 16

_LOAD = """
import sys
from kvproxy.operate.config.load import check_config
assert check_config("endpoints: [http://127.0.0.1:8000]")[0] is not None
for name, module in sys.modules.items():
    if name.startswith("kvproxy.") and not module.__file__.endswith("__init__.py"):
        print(name)
"""


def test_reading_a_configuration_loads_settings_and_little_else() -> None:
    """In a process of its own: the models, the decoder, the checks, and the settings of those features that have
    some."""
    found = subprocess.run([sys.executable, "-c", _LOAD], check=True, capture_output=True, text=True, timeout=60)
    loaded = found.stdout.split()
    features = {name for name in loaded if name.startswith("kvproxy.features.")}
    assert "kvproxy.operate.config.load" in loaded
    assert features <= {f"kvproxy.features.{name}.settings" for name in SHIPPED}
    assert len(loaded) - len(features) <= MOST_OF_THE_CORE, sorted(loaded)
    assert len(loaded) <= MOST
