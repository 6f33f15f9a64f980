"""LiteLLM's Router over three simulated engines: turns of a chat find their beginning cached."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm

from kvproxy.litellm import KVCacheRouting
from kvproxy.testing import simulated_engines

litellm.callbacks = [KVCacheRouting()]


async def main() -> None:
    """Hold four chats of three turns, turn by turn."""
    async with simulated_engines(3) as engines:
        deployments: list[Any] = [
            {"model_name": "my-model", "litellm_params": {"model": "hosted_vllm/sim", "api_base": f"{url}/v1"}}
            for url in engines.values()
        ]
        router = litellm.Router(model_list=deployments)
        chats: list[list[Any]] = [[{"role": "user", "content": f"Chat {n}. " + "Be brief. " * 200}] for n in range(4)]
        for turn in range(1, 4):
            for number, chat in enumerate(chats):
                answer: Any = await router.acompletion(model="my-model", messages=chat, max_tokens=8)
                chat += [dict(answer.choices[0].message), {"role": "user", "content": "Go on."}]
                cached = answer.usage.prompt_tokens_details.cached_tokens
                print(f"turn {turn} of chat {number}: {cached} of {answer.usage.prompt_tokens} tokens cached")


asyncio.run(main())
