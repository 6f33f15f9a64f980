"""The identifier of a picture is the one that vLLM computes."""

from __future__ import annotations

from hashlib import sha256

import pytest
from blake3 import blake3

from kvproxy.cache.media.identifiers import digest_picture
from tests.prefix.media.samples import IDENTIFIERS, RGB_PNG


@pytest.mark.parametrize(("raw", "rgb", "identifier"), IDENTIFIERS)
def test_identifiers_are_those_of_vllms_own_hasher(raw: bytes, identifier: str, *, rgb: bool) -> None:
    assert digest_picture(raw, rgb=rgb)("m/x") == identifier


def test_an_rgb_picture_follows_the_recipe_literally() -> None:
    """Lengths as 8 bytes, little endian, and the tag of a leaf."""

    def framed(piece: bytes) -> bytes:
        return len(piece).to_bytes(8, "little") + piece

    recipe = framed(b"image") + b"\3" + framed(b"image") + b"\3" + framed(RGB_PNG) + framed(b"model_id") + b"\3"
    assert digest_picture(RGB_PNG, rgb=True)("a/b") == blake3(recipe + framed(b"a/b")).hexdigest()


def test_another_model_has_another_identifier() -> None:
    identify = digest_picture(RGB_PNG, rgb=True)
    assert identify("a") != identify("b")
    assert identify("a") != sha256(RGB_PNG).hexdigest()
