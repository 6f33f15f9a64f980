"""Dubbo-go-Pixiu files, loaded unchanged: recognised by shape, mapped into our model, differences said once."""

from __future__ import annotations

from kvproxy.config.pixiu.load import decode_pixiu, is_pixiu

__all__ = ["decode_pixiu", "is_pixiu"]
