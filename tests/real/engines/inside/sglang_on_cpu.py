"""`sglang.launch_server` without an accelerator: `sglang_on_cpu.py ARGUMENTS`, its own arguments.

Scheduler, radix cache, HTTP server, metrics and KV events are SGLang's own; attention is torch's. Packages that only
CUDA, images or sound need, and SGLang's kernels, have stand-ins in which every name is an empty class: without kernels
it computes with torch. In SGLang's environment; the processes it spawns import this file again, and those with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = frozenset({"IPython", "av", "cutlass", "decord2", "sgl_kernel", "torchaudio", "torchvision", "triton"})


class _AnyName(type):
    """A class that has every attribute: another such class. As a decorator it leaves what it is given."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else _keep

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyName(name, (), {})
        setattr(cls, name, made)
        return made


def _keep(given: Any = None, *_: Any, **__: Any) -> Any:
    return given


class _StandIn(types.ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyName(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


_versions = importlib.metadata.version


def _version(distribution_name: str) -> str:
    """Return a version: transformers compares torchvision's with others."""
    return "0.28.0" if distribution_name == "torchvision" else _versions(distribution_name)


sys.meta_path.append(_Finder())
importlib.metadata.version = _version

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
