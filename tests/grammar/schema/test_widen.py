"""Forms get wider at one place, and nowhere narrower."""

from trunkline.grammar.interface import Finding
from trunkline.grammar.schema.forms import ANY, Arrays, Contains, Forms, Strings, Values
from trunkline.grammar.schema.widen import ANY_OBJECT, ANYTHING, only_objects, widen


def forms(*alternatives: Strings | Arrays | Values) -> Forms:
    return Forms(definitions={"d": alternatives}, root="d")


def at(pointer: str, keyword: str) -> Finding:
    return Finding(pointer, keyword, "because")


def test_only_the_fields_of_the_keyword() -> None:
    form = Strings(min_length=2, max_length=5, patterns=("^a",), pointer="/a")
    assert widen(forms(form), at("/a", "pattern")) == forms(Strings(min_length=2, max_length=5))
    assert widen(forms(form), at("/a", "maxLength")) == forms(Strings(min_length=2, patterns=("^a",)))


def test_an_unknown_keyword_or_an_empty_field_takes_the_whole_form() -> None:
    form = Strings(min_length=2, pointer="/a")
    assert widen(forms(form), at("/a", "not")) == forms(Strings())
    assert widen(forms(form), at("/a", "pattern")) == forms(Strings())


def test_the_closest_place_above_and_no_other() -> None:
    outer = Arrays(rest="d", contains=(Contains(item=ANY),), pointer="/a")
    other = Strings(min_length=1, pointer="/b")
    assert widen(forms(outer, other), at("/a/contains/x", "contains")) == forms(Arrays(rest="d"), other)


def test_nothing_there_changes_nothing() -> None:
    given = forms(Values(values=("1",), pointer="/a"))
    assert widen(given, at("/b", "enum")) == given
    assert widen(given, at("/a", "enum")) == given


def test_only_objects_are_left_where_there_are_any() -> None:
    both = Values(values=("1", '{"a":1}', "null"))
    assert only_objects(ANYTHING) == ANY_OBJECT
    assert only_objects(forms(Strings(), both)) == Forms(
        definitions={"d": (Strings(), both), "object0": (Values(values=('{"a":1}',)),)}, root="object0"
    )
    assert only_objects(forms(Strings(), Values(values=("1",)))) is None
    assert only_objects(ANY_OBJECT) is ANY_OBJECT
