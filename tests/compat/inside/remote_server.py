"""A pytest plugin for vLLM's own tests: their servers are the one at KVPROXY_COMPAT_URL. Runs without kvproxy."""

from __future__ import annotations

import os
import sys
import types
from typing import Any
from urllib.parse import urljoin

import openai
import vllm.tokenizers

URL = os.environ["KVPROXY_COMPAT_URL"]
TOKENIZER = os.environ["KVPROXY_COMPAT_TOKENIZER"]


class RemoteServer:
    """The members of a server that vLLM's tests use, for one that runs already."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str = "", *arguments: Any, **options: Any) -> None:
        self.model = model
        self.url_root = URL
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return urljoin(self.url_root + "/", "/".join(parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        options.setdefault("timeout", 60)
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options.setdefault("timeout", 60)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)


class _Utilities(types.ModuleType):
    """`tests.utils` with this server in it; whatever else a test asks for is not here."""

    RemoteOpenAIServer = RemoteLaunchRenderServer = RemoteAnthropicServer = RemoteServer
    VLLM_PATH = os.getcwd()


def _tokenizer_of_the_server(name: str, *arguments: Any, **options: Any) -> Any:
    return _get_tokenizer(TOKENIZER, *arguments, **options)


#: The server answers to every model's name with one model: the tokenizer of that one gives the ids that tests expect.
_get_tokenizer = vllm.tokenizers.get_tokenizer
vllm.tokenizers.get_tokenizer = _tokenizer_of_the_server
#: Stands in for vLLM's own module before pytest reads the first conftest, which imports it.
sys.modules["tests.utils"] = _Utilities("tests.utils")
