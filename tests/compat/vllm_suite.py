"""vLLM's own tests of its API, taken from the source distribution of the version in tests/real."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

from tests.compat.comparison import read_outcomes
from tests.compat.environments import INSIDE, PLACE, install, run_pytest
from tests.real.engines.place import TINY, VLLM

FOLDER = "tests/entrypoints"
#: Tests that need nothing but a server.
FILES = (
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_non_object_body_validation.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/test_return_token_ids.py",
    "openai/test_stop_token_ids.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
)
_PACKAGES = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-timeout==2.4.0", "anyio", "httpx", "requests")
_MODEL = re.compile(r'^\s*(?:MODEL_NAME|model_name)\w*\s*(?::[^=]*)?=\s*"([^"]+)"', re.MULTILINE)


def version() -> str:
    """Return vLLM's version as tests/real installs it."""
    found = re.search(r"^vllm\S*==(\S+)$", VLLM.versions.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def fetch() -> Path:
    """Return the folder of the unpacked tests, downloaded on first use. The package itself is not unpacked: it would
    hide the installed one."""
    folder = PLACE / f"vllm-{version()}"
    if not (folder / FOLDER).exists():
        archive = PLACE / f"vllm-{version()}.tar.gz"
        if not archive.exists():
            _download()
        with tarfile.open(archive) as packed:
            wanted = [one for one in packed if one.name.startswith(f"{folder.name}/{FOLDER}/")]
            packed.extractall(PLACE, members=wanted, filter="data")
        for path in (folder / "tests", folder / FOLDER):
            (path / "__init__.py").touch()  # without vLLM's conftest, which wants every package there is
    return folder


def _download() -> None:
    """Pip computes metadata of what it downloads, by vLLM's build script: hence its tools and the two variables."""
    tools = PLACE / "build-tools"
    pip = (str(VLLM.python), "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--target", str(tools), "setuptools_rust", "setuptools_scm", "cmake"], check=True)
    own = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version()}
    subprocess.run(
        [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={version()}"],
        cwd=PLACE,
        env={**os.environ, **own},
        check=True,
    )


def model_names() -> list[str]:
    """Return every model that these tests name: the engine serves one by all the names."""
    texts = ((fetch() / FOLDER / name).read_text() for name in FILES)
    return sorted({TINY.name, *(name for text in texts for name in _MODEL.findall(text))})


def run(url: str) -> dict[str, str]:
    """Return the outcomes of these tests against the server at `url`."""
    report = run_pytest(
        install("venv", _PACKAGES, on=VLLM),
        ["-p", "remote_server", *(f"{FOLDER}/{name}" for name in FILES)],
        url,
        folder=fetch(),
        environment={"PYTHONPATH": str(INSIDE), "KVPROXY_COMPAT_TOKENIZER": str(TINY.folder)},
    )
    return read_outcomes(report)
