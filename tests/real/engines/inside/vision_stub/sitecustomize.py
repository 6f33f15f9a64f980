"""Stands in for torchvision, of which there is no CPU build: vLLM imports it, and transformers must not use it."""

from __future__ import annotations

import sys
from typing import Any

import transformers.utils
import transformers.utils.import_utils


def unavailable(*_: Any, **__: Any) -> bool:
    return False


for module in (transformers.utils.import_utils, transformers.utils):
    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        if hasattr(module, name):
            setattr(module, name, unavailable)
backends = getattr(transformers.utils.import_utils, "BACKENDS_MAPPING", {})
if "torchvision" in backends:
    backends["torchvision"] = (unavailable, backends["torchvision"][1])
sys.stderr.write("torchvision is a stand-in\n")
