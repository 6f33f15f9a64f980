"""vLLM's NixlConnector, which pulls: the prefill answers with parameters, which the decoder gets whole."""

from __future__ import annotations

import msgspec

from kvproxy.features.disaggregation.connectors.base import (
    Engine,
    EngineFacts,
    Fetch,
    KvConnector,
    LegTerms,
    NoHandle,
    member_of,
    raw,
)

NAME = "kv_transfer_params"
_ASK = {
    NAME: raw(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
}


class _Params(msgspec.Struct):
    """Fields without which a decoder hangs, and dies of the client that leaves; and those that show how many blocks
    the prompt has."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[int | list[int]]  # of each cache group; older versions have one group
    remote_host: str
    remote_port: int
    remote_num_tokens: int = 0
    dcp_size: int = 1

    def count_blocks(self) -> int:
        """Return the blocks of the largest cache group."""
        groups = [len(one) for one in self.remote_block_ids if isinstance(one, list)]
        return max(groups, default=len(self.remote_block_ids))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_params = msgspec.json.Decoder(_Params).decode


class NixlConnector(KvConnector):
    """Engine ids, block ids and addresses come fresh with each prefill."""

    def begin(self, prefill: Engine) -> LegTerms:
        """Ask for the parameters."""
        return LegTerms(_ASK)

    async def prepare(self, prefill: Engine, fetch: Fetch, block_tokens: int) -> None:
        """Keep the size of its blocks: a decoder dies of parameters with too few of them."""
        self.facts[prefill] = EngineFacts(block_tokens)

    def read_member(self, answer: bytes, prefill: Engine) -> bytes:
        """Return the parameters, whole: newer versions add fields."""
        try:
            found = _decode_answer(answer)
            params = bytes(found.kv_transfer_params)
            read = _decode_params(params)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoHandle(str(error)) from None
        if not (read.do_remote_prefill and read.remote_block_ids and read.remote_request_id):
            raise NoHandle("no blocks to pull")
        tokens = read.remote_num_tokens or (0 if found.usage is None else found.usage.prompt_tokens)
        block_tokens = self.facts.get(prefill, EngineFacts()).block_tokens * max(1, read.dcp_size)
        if block_tokens and read.count_blocks() * block_tokens < tokens:
            raise NoHandle(f"{read.count_blocks()} blocks of {block_tokens} tokens for a prompt of {tokens}")
        return member_of(NAME, params)
