"""LangChain's standard tests for the server at KVPROXY_COMPAT_URL. Runs without kvproxy."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["KVPROXY_COMPAT_URL"]
_MODEL: dict[str, Any] = {"model": os.environ["KVPROXY_COMPAT_MODEL"], "api_key": "none", "max_retries": 0}
#: What has room in a tiny model's context, where ChatAnthropic would ask for 4,096 tokens, and is the same each time.
_MODEL |= {"max_tokens": 32, "temperature": 0}


class TestChatOpenAI(ChatModelIntegrationTests):
    """By Chat Completions."""

    @property
    def chat_model_class(self) -> type[Any]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**_MODEL, "base_url": f"{URL}/v1"}


class TestResponses(TestChatOpenAI):
    """By Responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestChatAnthropic(ChatModelIntegrationTests):
    """By Messages."""

    @property
    def chat_model_class(self) -> type[Any]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**_MODEL, "base_url": URL}
