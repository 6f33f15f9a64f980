"""Base of every configuration model, and the scalar types they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(BaseModel):
    """Strict and immutable: an unknown key is an error, a loaded configuration never changes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
