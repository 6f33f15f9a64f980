"""Empty names of torchvision for imports; nothing of it is called."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

__version__ = "0.0"


class InterpolationMode(enum.Enum):
    """The names that transformers lists."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _empty(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def __getattr__(name: str) -> Any:
    return _empty(name)


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.{name}")
    module.__getattr__ = _empty  # type: ignore[method-assign]
    module.__path__ = []
    module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module


transforms, io = _module("transforms"), _module("io")
transforms.v2 = _module("transforms.v2")  # type: ignore[attr-defined]
transforms.functional = _module("transforms.functional")  # type: ignore[attr-defined]
transforms.v2.functional = _module("transforms.v2.functional")
