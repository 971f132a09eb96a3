"""Objects whose keys come in any order: every permutation is written, no key twice, nothing that is missing; and masks stay small."""

import json
import random
from itertools import permutations
from typing import Any

import pytest

from tests.grammar.backends.llguidance.test_sequences import check, compiled
from tests.grammar.matching import accepts, allowed, follow, random_text, small_vocabulary, takes
from tests.grammar.schemas import forms_of
from trunkline.grammar.backends.llguidance.any_order import MOST_PARTS, any_order
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import emit
from trunkline.grammar.backends.llguidance.lark import LarkWriter, quote
from trunkline.grammar.backends.llguidance.sequences import Part
from trunkline.grammar.interface import CompiledGrammar

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)


def grammar_of(schema: Any, key_order: str = "any") -> CompiledGrammar:
    return BACKEND.compile(emit(forms_of(schema), compact=False, key_order=key_order))


def numbered(count: int, **fields: Any) -> dict[str, Any]:
    """An object of so many integers."""
    return {"type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(count)}} | fields


def members(*names: str) -> str:
    """An object with these keys, which may come twice."""
    return "{" + ", ".join(f'"{name}": 1' for name in names) + "}"


def taken(grammar: CompiledGrammar, *names: str) -> bool:
    return accepts(grammar, VOCABULARY, members(*names))


@pytest.mark.parametrize(
    ("least", "most"),
    [(0, None), (1, None), (0, 1), (0, 2), (1, 2), (2, 2), (2, None), (3, 3), (0, 3), (4, None), (3, 4)],
)
@pytest.mark.parametrize("extra", [None, "x"])
@pytest.mark.parametrize("required", ["", "b", "ac", "abc"])
def test_rows(least: int, most: int | None, extra: str | None, required: str) -> None:
    if (most is not None and most < len(required)) or least > 3 + (extra is not None):
        return
    if least <= len(required):
        least = 0
    lark = LarkWriter()
    parts = [Part(quote(letter), letter in required) for letter in "abc"]
    start = any_order(lark, ",", parts, extra and quote(extra), "]", least, most)

    def is_right(text: str) -> bool:
        named = text.replace("x", "")
        return (
            len(set(named)) == len(named)
            and set(required) <= set(named)
            and (extra is not None or named == text)
            and least <= len(set(text))  # two extras may be the same one
            and (most is None or len(text) <= most)
            # what may be a repetition leaves room for what is needed
            and (most is None or text.count("x") - ("x" in text) <= most - max(least, len(required)))
        )

    check(compiled(lark, start), "abcx", 4, "]", is_right)


@pytest.mark.parametrize("closed", [True, False])
def test_all_permutations(closed: bool) -> None:
    grammar = grammar_of(numbered(4, required=["k1", "k3"], additionalProperties=not closed))
    names = ["k0", "k1", "k2", "k3"]
    for size in range(5):
        for chosen in permutations(names, size):
            assert taken(grammar, *chosen) == ({"k1", "k3"} <= set(chosen)), chosen
            if chosen:
                assert not taken(grammar, *chosen, chosen[0])
    for place in range(5):
        between = [*names[:place], "other", *names[place:]]
        assert taken(grammar, *between) == (not closed)


def test_order_of_the_schema_is_the_default() -> None:
    grammar = BACKEND.compile(emit(forms_of(numbered(2)), compact=False))
    assert taken(grammar, "k0", "k1", "x") and not taken(grammar, "k1", "k0") and not taken(grammar, "x", "k0")


def test_objects_in_objects_and_patterns() -> None:
    schema = {
        "type": "object",
        "properties": {"a": numbered(2), "b": {"type": "array", "items": numbered(2, additionalProperties=False)}},
        "patternProperties": {"^x-": {"type": "string"}},
        "additionalProperties": False,
    }
    grammar = grammar_of(schema)
    for text, valid in {
        '{"x-1": "", "b": [{"k1": 1, "k0": 2}, {"k1": 1}], "a": {"z": 1, "k1": 1, "y": [], "k0": 1}}': True,
        '{"b": [{"k1": 1, "k1": 2}]}': False,
        '{"a": {"z": 1, "k1": ""}}': False,
        '{"x-1": 1}': False,
        '{"a": {}, "x-1": "", "a": {}}': False,
    }.items():
        assert accepts(grammar, VOCABULARY, text) == valid, text


def test_an_escape_hides_no_key() -> None:
    grammar = grammar_of(numbered(2))
    assert not accepts(grammar, VOCABULARY, '{"k0": 1, "\\u006b0": 1}')


def test_counts_of_properties() -> None:
    grammar = grammar_of(numbered(4, minProperties=2, maxProperties=3, required=["k2"], additionalProperties=False))
    for size in range(5):
        for chosen in permutations(["k0", "k1", "k2", "k3"], size):
            assert taken(grammar, *chosen) == ("k2" in chosen and 2 <= size <= 3), chosen


def test_what_is_left_is_forced() -> None:
    grammar = grammar_of(numbered(3, required=["k0", "k1", "k2"], additionalProperties=False))
    matcher = grammar.matcher()
    assert follow(matcher, VOCABULARY, VOCABULARY.encode(b'{"k2": 1, "k'))
    assert allowed(matcher, VOCABULARY) == {b"0", b"1"}
    assert follow(matcher, VOCABULARY, VOCABULARY.encode(b'0": 1, '))
    assert b"".join(VOCABULARY.tokens[token] for token in matcher.forced()) == b'"k1": '


def test_values_are_forced_as_before() -> None:
    grammar = grammar_of({"type": "object", "properties": {"a": {"const": "hello"}, "b": {"const": 1}}})
    matcher = grammar.matcher()
    assert follow(matcher, VOCABULARY, VOCABULARY.encode(b'{"b": 1, "a"'))
    assert b"".join(VOCABULARY.tokens[token] for token in matcher.forced()).startswith(b': "hello')


def test_as_many_as_there_are_bits() -> None:
    names = [f"k{number}" for number in range(MOST_PARTS)]
    grammar = grammar_of(numbered(MOST_PARTS, required=names[::2], minProperties=40))
    random.Random(0).shuffle(names)
    assert taken(grammar, *names) and taken(grammar, "x", *names, "y")
    assert not taken(grammar, *names, names[7]) and not taken(grammar, *names[:59])
    counted = grammar_of(numbered(MOST_PARTS, maxProperties=62))
    assert taken(counted, *names, "x", "y") and not taken(counted, *names, "x", "y", "z")


def test_more_keep_the_order_of_the_schema() -> None:
    names = [f"k{number}" for number in range(MOST_PARTS + 1)]
    schema = {"type": "object", "properties": {"deep": numbered(3), "wide": numbered(MOST_PARTS + 1)}}
    grammar = grammar_of(schema)
    for wide, valid in ((names, True), (names[::-1], False)):
        text = f'{{"wide": {members(*wide)}, "deep": {members("k2", "k0")}}}'
        assert takes(grammar, VOCABULARY, text) == valid


def test_many_other_keys_stay_within_the_limits_of_the_library() -> None:
    grammar = grammar_of(numbered(2, required=["k0"]))
    assert takes(grammar, VOCABULARY, members(*(f"x{number}" for number in range(3000)), "k0", "y"))


def test_random_texts_are_json_without_duplicates() -> None:
    grammar = grammar_of(numbered(5, required=["k4"], maxProperties=6, minProperties=3))

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs if name in {f"k{number}" for number in range(5)}]
        assert len(names) == len(set(names))
        assert len(pairs) <= 6
        return dict(pairs)

    ended = 0
    for seed in range(30):
        if (text := random_text(grammar, VOCABULARY, seed)) is not None:
            value = json.loads(text, object_pairs_hook=lambda pairs: distinct(pairs))
            assert "k4" in value and len(value) >= 3
            ended += 1
    assert ended > 3
