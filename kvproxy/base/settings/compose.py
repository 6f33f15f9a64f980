"""Models of the core with the fields that installed features add to them, and how code reads these fields.

A feature adds fields by a model of its own that has them: `class GreetingPlace(Model): greeting: str = ""`. The model
that a file is decoded into inherits from it and from the core's, so `isinstance` and the types show which fields exist.
Each is made once for a process: models of two classes are never equal, and a reload would find everything changed."""

from __future__ import annotations

import copy
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import create_model
from pydantic.fields import FieldInfo

from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.base.settings.model import Model

M = TypeVar("M", bound=Model)


def composed(model: type[M]) -> type[M]:
    """Return the model, and models within it, with the fields of all installed features."""
    return cast("type[M]", _compose(model))


def part_of(settings: Model, fields: type[M]) -> M:
    """Return the settings as a model with the fields that a feature added; their defaults where the core made the
    settings by itself."""
    return settings if isinstance(settings, fields) else fields()


def without_features(settings: M, core: type[Model], *kept: type[Model]) -> M:
    """Return the settings with the fields of features at their defaults, but for those of the `kept` models."""
    ours = {name for model in (core, *kept) for name in model.model_fields}
    fields = type(settings).model_fields
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in fields.keys() - ours}
    return settings.model_copy(update=defaults)


@cache
def _compose(model: type[Model]) -> type[Model]:
    added = [
        fields
        for feature in settings_of_features()
        for place, models in feature.fields.items()
        if issubclass(model, place)
        for fields in models
    ]
    return compose_model(model, tuple(added))


def compose_model(model: type[Model], added: tuple[type[Model], ...]) -> type[Model]:
    """Return a class that is both the model and those with the added fields; the model itself where nothing
    is added."""
    changed = {}
    for name, field in model.model_fields.items():
        kind = _replace(field.annotation)
        if kind is not field.annotation:
            changed[name] = (kind, _field_of(field, kind))
    if not added and not changed:
        return model
    whole = cast("Any", create_model)(
        model.__name__, __base__=(*added, model), __doc__=model.__doc__, __module__=model.__module__, **changed
    )
    whole.__reduce__ = lambda self: (_restore, (model, self.__getstate__()))  # made at run time: found by its model
    return cast("type[Model]", whole)


def _restore(model: type[Model], state: Any) -> Model:
    kind = composed(model)
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made


def _replace(annotation: Any) -> Any:
    """Return the same annotation object where no model in it gets fields."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return composed(annotation)
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    replaced = tuple(_replace(one) for one in arguments)
    if origin is None or all(one is other for one, other in zip(arguments, replaced, strict=True)):
        return annotation
    if origin in (Union, UnionType):
        return Union[replaced]  # noqa: UP007 - of a tuple
    if origin is Annotated:
        return Annotated[(replaced[0], *annotation.__metadata__)]
    return origin[replaced]


def _field_of(field: FieldInfo, kind: Any) -> FieldInfo:
    """Return the field with the other annotation, and with a default of the new class."""
    made = copy.copy(field)
    made.annotation = kind
    if isinstance(field.default, Model):
        default = field.default
        made.default = composed(type(default))(**{name: getattr(default, name) for name in default.model_fields_set})
    return made
