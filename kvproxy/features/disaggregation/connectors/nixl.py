"""vLLM's NixlConnector, which pulls: the prefill answers with parameters, which the decoder gets whole."""

from __future__ import annotations

import msgspec

from kvproxy.features.disaggregation.connectors.base import Engine, KvConnector, LegTerms, NoHandle, member_of, raw

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
    """Fields without which a decoder hangs, and dies of the client that leaves."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[msgspec.Raw]
    remote_host: str
    remote_port: int


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_params = msgspec.json.Decoder(_Params).decode


class NixlConnector(KvConnector):
    """Engine ids, block ids and addresses come fresh with each prefill."""

    def begin(self, prefill: Engine) -> LegTerms:
        """Ask for the parameters."""
        return LegTerms(_ASK)

    def read_member(self, answer: bytes) -> bytes:
        """Return the parameters, whole: newer versions add fields."""
        try:
            params = bytes(_decode_answer(answer).kv_transfer_params)
            read = _decode_params(params)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoHandle(str(error)) from None
        if not (read.do_remote_prefill and read.remote_block_ids and read.remote_request_id):
            raise NoHandle("no blocks to pull")
        return member_of(NAME, params)
