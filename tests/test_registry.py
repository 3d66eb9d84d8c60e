"""The registry: filled by decorators, asked by name or alias, and helpful when the name is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from motley.core.errors import MotleyError, unknown
from motley.core.registry import Entry, Registry
from motley.data import DATASETS, PARTITIONS
from motley.methods import METHODS
from motley.models import MODELS
from motley.splits import SPLITS


@pytest.fixture
def fruits() -> Registry[Callable[[], str]]:
    """Return a registry of two functions."""
    registry: Registry[Callable[[], str]] = Registry("fruit")

    @registry.register("pear", "green", paper="Williams 1770", aliases=("bartlett", "poire"))
    def pear() -> str:
        return "pear"

    @registry.register("apple", "red")
    def apple() -> str:
        return "apple"

    return registry


def test_the_decorator_returns_what_it_files(fruits: Registry[Callable[[], str]]) -> None:
    def plum() -> str:
        return "plum"

    assert fruits.register("plum", "blue")(plum) is plum
    assert fruits["plum"] is plum


def test_a_thing_is_found_under_its_name_and_under_every_alias(
    fruits: Registry[Callable[[], str]],
) -> None:
    for name in ("pear", "bartlett", "poire"):
        assert name in fruits
        assert fruits[name]() == "pear"
        assert fruits.entry(name).name == "pear"
    assert "plum" not in fruits and 3 not in fruits


def test_an_entry_knows_what_a_list_prints(fruits: Registry[Callable[[], str]]) -> None:
    item = fruits["pear"]
    assert fruits.entry("pear") == Entry(
        "pear", item, "green", "Williams 1770", ("bartlett", "poire")
    )
    assert (fruits.entry("apple").paper, fruits.entry("apple").aliases) == ("", ())


def test_entries_come_in_the_order_of_registration_and_aliases_are_none(
    fruits: Registry[Callable[[], str]],
) -> None:
    assert [entry.name for entry in fruits] == ["pear", "apple"]


@pytest.mark.parametrize(
    ("name", "aliases"),
    [("pear", ()), ("poire", ()), ("quince", ("apple",)), ("quince", ("bartlett",))],
)
def test_a_name_that_is_taken_is_refused_and_nothing_is_filed(
    fruits: Registry[Callable[[], str]], name: str, aliases: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="is registered twice"):
        fruits.register(name, "again", aliases=aliases)(lambda: "again")
    assert [entry.name for entry in fruits] == ["pear", "apple"]
    assert fruits["poire"]() == "pear" and "quince" not in fruits


def test_an_unknown_name_is_answered_with_the_setting_the_nearest_and_all(
    fruits: Registry[Callable[[], str]],
) -> None:
    with pytest.raises(MotleyError) as raised:
        fruits.entry("aple", "basket.fruit")
    assert (
        str(raised.value)
        == "basket.fruit: unknown fruit 'aple'. Did you mean 'apple'? Allowed: apple, pear."
    )
    with pytest.raises(MotleyError) as raised:
        fruits["zzz"]
    assert str(raised.value) == "unknown fruit 'zzz'. Allowed: apple, pear."


def test_where_nothing_is_allowed_the_message_says_so() -> None:
    assert unknown("fruit", "pear", ()) == "unknown fruit 'pear'. Allowed: none."


@pytest.mark.parametrize(
    "registry", [METHODS, MODELS, DATASETS, PARTITIONS, SPLITS], ids=lambda r: r.kind
)
def test_everything_registered_has_a_line_about_it(registry: Registry[object]) -> None:
    entries = list(registry)
    assert entries
    assert all(entry.summary and "\n" not in entry.summary for entry in entries)
