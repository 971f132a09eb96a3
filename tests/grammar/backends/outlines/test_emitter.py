"""outlines-core follows exactly what its emitter says: random forms, and what is refused for it."""

import re

import pytest

from tests.grammar.matching import accepts, small_vocabulary
from tests.grammar.random_forms import hold_to_forms
from tests.grammar.schemas import forms_of
from trunkline.grammar.backends.outlines.backend import OutlinesBackend
from trunkline.grammar.backends.outlines.emitter import emit, emit_choice, emit_regex
from trunkline.grammar.interface import Unsupported

VOCABULARY = small_vocabulary()
BACKEND = OutlinesBackend(VOCABULARY)


def takes(schema: object, text: str) -> bool:
    return accepts(BACKEND.compile(emit(forms_of(schema))), VOCABULARY, text)


def reason(schema: object) -> str:
    with pytest.raises(Unsupported) as caught:
        emit(forms_of(schema))
    return caught.value.finding.reason


def test_random_forms() -> None:
    taken = hold_to_forms(
        lambda forms, compact: BACKEND.compile(emit(forms, compact=compact)), VOCABULARY, 120, turns=4, most=60
    )
    assert taken > 30


def test_patterns_cannot_leave_their_string() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": ".*"}}, "required": ["a"]}
    assert takes(schema, '{"a": "x\\", \\"evil"}')
    assert not takes(schema, '{"a": "x", "evil": "y"}')
    assert not takes({"type": "string", "pattern": '^"[a-z]+"$'}, '""abc""')
    assert takes({"type": "string", "pattern": '^"[a-z]+"$'}, '"\\"abc\\""')


def test_allof_is_no_concatenation() -> None:
    schema = {"allOf": [{"type": "integer"}, {"minimum": 0, "maximum": 7}]}
    assert takes(schema, "0") and takes(schema, "7")
    assert not takes(schema, "00") and not takes(schema, "8")


def test_optional_properties_in_every_combination() -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in "abc"},
        "additionalProperties": False,
    }
    for required in ([], ["b"], ["a", "c"]):
        for present in range(8):
            names = [name for index, name in enumerate("abc") if present >> index & 1]
            text = "{" + ", ".join(f'"{name}": null' for name in names) + "}"
            assert takes(schema | {"required": required}, text) == (set(required) <= set(names)), (required, text)


def test_what_nests_without_limit_is_refused() -> None:
    assert "nested" in reason({})
    assert "nested" in reason(
        {"$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}, "type": "object"}}, "$ref": "#/$defs/N"}
    )


def test_what_makes_many_states_is_refused() -> None:
    assert "states" in reason({"type": "string", "maxLength": 100})
    assert "characters" in reason(
        {"type": "array", "maxItems": 1000, "items": {"type": "string", "pattern": "^[a-z]{40}$"}}
    )


@pytest.mark.parametrize(
    "source", ["[a-z]+", "a|ab|abc", "(a{0,2}){0,2}", "-?(0|[1-9][0-9]*)", "(?!ab)[abc]{2}", "x*?y"]
)
def test_expressions_match_as_a_whole(source: str) -> None:
    compiled = BACKEND.compile(emit_regex(source))
    for text in ("", "a", "ab", "abc", "aaaa", "aaaaa", "bc", "12", "-0", "01", "y", "xxy", "hello"):
        assert accepts(compiled, VOCABULARY, text) == bool(re.fullmatch(source, text)), text


@pytest.mark.parametrize("source", ["[0-9]+(\\.[0-9]+)?", "a[ab]{20}", "[^x]{0,100}"])
def test_expressions_that_the_library_would_get_wrong_or_too_large(source: str) -> None:
    with pytest.raises(Unsupported):
        emit_regex(source)


def test_choices() -> None:
    compiled = BACKEND.compile(emit_choice(("yes", "no", 'q"[')))
    assert all(accepts(compiled, VOCABULARY, text) for text in ("yes", "no", 'q"['))
    assert not any(accepts(compiled, VOCABULARY, text) for text in ("", "ye", "yesno"))
    with pytest.raises(Unsupported):
        emit_choice(("yes", "yes please"))
