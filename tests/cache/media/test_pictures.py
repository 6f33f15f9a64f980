"""Sizes of pictures from their first bytes."""

from __future__ import annotations

import struct

import pytest

from kvproxy.cache.media.pictures import Picture, read_picture
from tests.cache.media import samples

_FRAME = struct.pack(">BBHBHHB", 0xFF, 0xC0, 17, 8, 2, 3, 3)
_JPEG = b"\xff\xd8" + b"\xff\xe0\x00\x04ab" + b"\xff" + _FRAME  # with a fill byte in front of the frame


@pytest.mark.parametrize(
    "raw",
    [
        samples.RGB_PNG,
        samples.RGBA_PNG,
        samples.GREY_PNG,
        samples.GIF,
        samples.WEBP,
        samples.LOSSLESS_RGB_WEBP,
        samples.LOSSLESS_RGBA_WEBP,
        samples.EXTENDED_RGBA_WEBP,
        _JPEG,
    ],
)
def test_each_format_gives_its_size(raw: bytes) -> None:
    assert read_picture(raw) == Picture(3, 2)


@pytest.mark.parametrize("raw", [b"", b"%PDF-1.7", b"\xff\xd8\xff\xd9", b"RIFF1234WEBPVP8 ", b"\xff\xd8\x00\x00"])
def test_other_bytes_have_no_size(raw: bytes) -> None:
    assert read_picture(raw) is None


def test_every_beginning_of_a_picture_is_read_or_refused_without_an_error() -> None:
    for raw in (samples.RGB_PNG, samples.GIF, samples.WEBP, samples.EXTENDED_RGBA_WEBP, _JPEG):
        found = {read_picture(raw[:length]) for length in range(len(raw))}
        assert found <= {None, read_picture(raw)}
