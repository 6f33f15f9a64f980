"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvproxy.base.types import RequestKind
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cache.clients.vllm import ChatForm


class OtherApis(Feature):
    """Makes chats of messages and responses, so that engines can tokenize them."""

    name = "other_apis"

    def find_chat_form(self, kind: RequestKind, sglang: bool) -> ChatForm | None:
        """Return the conversion that the engine itself makes."""
        if kind is RequestKind.MESSAGES and sglang:
            from kvproxy.features.other_apis.sglang_messages import sglang_chat_of_messages

            return sglang_chat_of_messages
        if kind is RequestKind.MESSAGES:
            from kvproxy.features.other_apis.messages_chat import chat_of_messages

            return chat_of_messages
        if kind is RequestKind.RESPONSES:
            from kvproxy.features.other_apis.responses_chat import chat_of_responses

            return chat_of_responses
        return None


FEATURE = OtherApis()
