"""Models of the core with the fields that features add to them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from functools import cache

import pytest

from kvproxy.base.settings import compose
from kvproxy.base.settings.compose import composed, part_of, without_features
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import dotted_path
from kvproxy.operate.config.decode import decode_model


class Inner(Model):
    """A section of the core."""

    size: int = 1
    """Its size."""


class Outer(Model):
    """The root."""

    inner: Inner = Inner(size=2)
    """One."""
    named: Mapping[str, Inner] = {}
    """By name."""
    listed: tuple[Inner, ...] = ()
    """In order."""
    optional: Inner | None = None
    """None: none."""


class HoldSettings(Model):
    """A feature's own section."""

    most: Duration = 5.0
    """How long."""


class HoldPlace(Model):
    """Where it stands."""

    hold: HoldSettings = HoldSettings()
    """Keeping things."""


@pytest.fixture(autouse=True)
def _with_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose for these tests alone: what was composed before stays as it is for all others."""
    monkeypatch.setattr(compose, "settings_of_features", lambda: [FeatureSettings(fields={Inner: (HoldPlace,)})])
    monkeypatch.setattr(compose, "_compose", cache(compose._compose.__wrapped__))


def test_its_fields_are_wherever_the_model_is() -> None:
    """In sections, mappings, lists and optional places; defaults of the core stay."""
    whole = composed(Outer).model_validate(
        {"named": {"x": {"hold": {"most": "2s"}}}, "listed": [{}], "optional": {"hold": {"most": 1}}}
    )
    assert part_of(whole.named["x"], HoldPlace).hold.most == 2.0
    assert part_of(whole.listed[0], HoldPlace).hold.most == 5.0
    assert whole.optional is not None
    assert part_of(whole.optional, HoldPlace).hold.most == 1.0
    assert (whole.inner.size, part_of(whole.inner, HoldPlace).hold) == (2, HoldSettings())


def test_settings_that_the_core_made_have_its_defaults() -> None:
    """Code that builds a section by itself leaves the feature's fields out."""
    assert part_of(Inner(), HoldPlace).hold == HoldSettings()


def test_an_unknown_key_names_the_nearest_of_the_feature_too() -> None:
    """A message does not tell the core's keys from a feature's."""
    found = decode_model(composed(Outer), {"inner": {"hld": {}}}, dotted_path)
    assert [(one.path, one.message, one.hint) for one in found.problems] == [
        ("inner.hld", "unknown key", "did you mean 'hold'?")
    ]


def test_composed_once() -> None:
    """Models of two classes are never equal: every reload would find everything changed."""
    assert composed(Outer) is composed(Outer)
    assert composed(Outer).model_validate({}) == composed(Outer).model_validate({})


def test_it_is_pickled_by_its_model() -> None:
    """Workers get a configuration from their supervisor, whose class was made at run time."""
    whole = composed(Outer).model_validate({"named": {"x": {"hold": {"most": "2s"}}}})
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert copy.deepcopy(whole) == whole


def test_its_fields_are_described_like_the_core_s() -> None:
    """The reference and the JSON Schema take descriptions from the feature's model."""
    schema = composed(Outer).model_json_schema()["$defs"]
    assert schema["Inner"]["properties"]["hold"]["description"] == "Keeping things."
    assert schema["Inner"]["properties"]["size"]["description"] == "Its size."
    assert schema["Inner"]["description"] == "A section of the core."


def test_a_model_without_additions_stays_itself() -> None:
    """No class is made for nothing."""
    assert composed(HoldSettings) is HoldSettings


def test_settings_without_features_have_their_defaults() -> None:
    """Fields of the core stay, and those of models that are named to be kept."""
    given = composed(Inner).model_validate({"size": 7, "hold": {"most": "2s"}})
    bare = without_features(given, Inner)
    assert (bare.size, part_of(bare, HoldPlace).hold.most) == (7, 5.0)
    assert without_features(given, Inner, HoldPlace) == given
