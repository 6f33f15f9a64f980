"""Where the real engines are installed, and whether they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

HERE = Path(__file__).parent


def root() -> Path:
    """Everything installed and written lies under it; deleting it undoes the installation."""
    given = os.environ.get("KVPROXY_REAL_ROOT")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvproxy-real"


class Environment:
    """A virtual environment made from one list of exact versions, `NAME.txt` beside this file, and laid on that of
    `base`, whose packages it sees as well."""

    def __init__(self, name: str, *, base: Environment | None = None) -> None:
        self.name = name
        self.base = base
        self.folder = root() / f"venv-{name}"
        self.python = self.folder / "bin" / "python"
        self.versions = HERE / f"{name}.txt"
        self._stamp = self.folder / ".kvproxy-installed"

    @property
    def installed(self) -> bool:
        """Whether it holds exactly the versions listed now."""
        return self._stamp.exists() and self._stamp.read_text() == self._wanted()

    def mark_installed(self) -> None:
        """Call when every step has succeeded."""
        self._stamp.write_text(self._wanted())

    def _wanted(self) -> str:
        return (self.base._wanted() if self.base else "") + self.versions.read_text()


VLLM = Environment("vllm")
LMCACHE = Environment("lmcache")
SGLANG = Environment("sglang", base=VLLM)


#: NIXL by its wheels for CUDA, whose transfers work without: apart, so that engines without it stay as they are.
NIXL = root() / "nixl"
NIXL_VERSIONS = ("nixl==1.5.1", "nixl-cu12==1.5.1")


class Model:
    """A small random model with a true tokenizer and chat template, made by `inside/tiny_model.py`."""

    def __init__(self, name: str, *, max_tokens: int, shape: tuple[str, ...] = ()) -> None:
        self.name = name
        self.max_tokens = max_tokens
        self.folder = root() / name
        self.arguments = (str(self.folder), "--max-len", str(max_tokens), *shape)
        self._stamp = self.folder / ".kvproxy-made"

    @property
    def made(self) -> bool:
        """Whether it was made by the present script with the present arguments."""
        return self._stamp.exists() and self._stamp.read_text() == self._wanted()

    def mark_made(self) -> None:
        """Call when the script has succeeded."""
        self._stamp.write_text(self._wanted())

    def _wanted(self) -> str:
        script = (HERE / "inside" / "tiny_model.py").read_bytes()
        return hashlib.sha256(script + " ".join(self.arguments).encode()).hexdigest()


#: 10 million parameters: prefill is nearly free, for tests of protocols.
TINY = Model("tiny", max_tokens=8192)
#: 102 million parameters: 4000 tokens of prefill take most of a second on one core, so that cache hits show in TTFT.
MID = Model(
    "mid",
    max_tokens=16384,
    shape=("--hidden", "512", "--layers", "8", "--heads", "8", "--kv-heads", "2", "--inter", "1536"),
)


def missing() -> str:
    """Return missing installations for tests, in words; empty if complete."""
    lacking = [each.name for each in (VLLM, LMCACHE, SGLANG) if not each.installed]
    lacking += [f"the model {each.name}" for each in (TINY, MID) if not each.made]
    return ", ".join(lacking)
