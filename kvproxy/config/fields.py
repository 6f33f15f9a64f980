"""What a model allows at a path: the keys a message can offer instead of an unknown one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from kvproxy.config.model import Model
from kvproxy.config.paths import Path


def bare_type(annotation: Any) -> Any:
    """The type without `Annotated` and without `| None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return bare_type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        some = [arg for arg in get_args(annotation) if arg is not types.NoneType]
        return bare_type(some[0]) if len(some) == 1 else annotation
    return annotation


def model_at(model: type[Model], path: Path) -> type[Model] | None:
    """The model that describes what stands at `path` below `model`, if one does."""
    current: Any = model
    for part in path:
        current = bare_type(current)
        if isinstance(current, type) and issubclass(current, Model):
            field = next((f for name, f in current.model_fields.items() if part in (f.alias or name, name)), None)
            current = field.annotation if field is not None else None
        elif get_origin(current) is not None and issubclass(get_origin(current), Mapping):
            current = get_args(current)[1]
        elif get_origin(current) is tuple:
            current = get_args(current)[0]
        else:
            return None
    current = bare_type(current)
    return current if isinstance(current, type) and issubclass(current, Model) else None


def keys_of(model: type[Model]) -> list[str]:
    """The keys a file may give for this model."""
    return [field.alias or name for name, field in model.model_fields.items()]


def closest_word(wrong: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    folded = {word.casefold().replace("-", "_"): word for word in known}
    matches = difflib.get_close_matches(wrong.casefold().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def spelling_hint(wrong: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, else all of them if they are few."""
    known = sorted(known)
    close = closest_word(wrong, known)
    if close is not None:
        return f"did you mean {close!r}?"
    return f"known: {', '.join(known)}" if 0 < len(known) <= 40 else ""
