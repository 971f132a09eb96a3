"""XGrammar follows exactly what its emitter says. Slow: importing the library takes seconds."""

import json
import re
from typing import Any

import pytest

from tests.grammar.matching import accepts, small_vocabulary
from tests.grammar.random_forms import hold_to_forms
from tests.grammar.schemas import forms_of
from trunkline.api.response_format import ConstraintFields, GrammarDefaults
from trunkline.constraint import GrammarSource, Tag, Tags
from trunkline.grammar.backends import registry
from trunkline.grammar.backends.xgrammar import structural_tag
from trunkline.grammar.backends.xgrammar.emitter import emit, emit_choice, emit_ebnf, emit_regex, emit_tags
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.prepare import prepare

VOCABULARY = small_vocabulary()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backend() -> Any:
    return registry.make("xgrammar", VOCABULARY)


@pytest.fixture
def takes(backend: Any) -> Any:
    def takes(what: Any, text: str | bytes) -> bool:
        source = what if isinstance(what, GrammarSource) else emit(forms_of(what))
        return accepts(backend.compile(source), VOCABULARY, text)

    return takes


def test_random_forms(backend: Any) -> None:
    taken = hold_to_forms(
        lambda forms, compact: backend.compile(emit(forms, compact=compact)), VOCABULARY, 600, turns=3, most=80
    )
    assert taken > 300


def test_strings_are_json_whatever_the_pattern(takes: Any) -> None:
    for pattern, inside, outside in (
        ('^"[a-z]+"$', '"\\"abc\\""', '""abc""'),
        ("^a\\nb$", '"a\\nb"', '"a\nb"'),
        ("^C:\\\\[a-z]+$", '"C:\\\\win"', '"C:\\win"'),
    ):
        assert takes({"type": "string", "pattern": pattern}, inside)
        assert not takes({"type": "string", "pattern": pattern}, outside)


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": "string", "maxLength": 4}, {"type": "string", "maxLength": 99}]
)
def test_no_string_holds_what_is_no_unicode_or_no_json(takes: Any, schema: Any) -> None:
    for raw in (b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x1f", b"\x00"):
        matcher_took = False
        try:
            matcher_took = takes(schema, b'"' + raw + b'"')
        except UnicodeDecodeError:  # the tokenizer cannot even write it: go byte by byte
            compiled = registry.make("xgrammar", VOCABULARY).compile(emit(forms_of(schema)))
            matcher_took = compiled.matcher().count_valid([*b'"', *raw]) == 1 + len(raw)
        assert not matcher_took, raw
    assert not takes(schema, '"\\ud83d"')
    assert takes(schema, '"é😀\x7f"')


def test_lengths_count_characters(takes: Any) -> None:
    for most in (5, 40):
        schema = {"type": "string", "minLength": 2, "maxLength": most}
        for character in ("a", "é", "😀"):
            assert takes(schema, json.dumps(character * most, ensure_ascii=False))
            assert not takes(schema, json.dumps(character * (most + 1), ensure_ascii=False))
            assert not takes(schema, json.dumps(character, ensure_ascii=False))
    assert takes({"type": "string", "maxLength": 2}, '"\\n\\""')
    assert takes({"type": "string", "minLength": 40}, json.dumps("a" * 45 + '"'))


def test_numbers_are_finite(takes: Any) -> None:
    assert takes({"type": "number"}, "1e99") and takes({"type": "number"}, "-2.5e-07")
    assert not takes({"type": "number"}, "1e999") and not takes({"type": "number"}, "9" * 400)
    assert not takes({"type": "number"}, "01") and not takes({"type": "number"}, ".5")


TWO_STYLES: Any = {
    "type": "object",
    "properties": {"a": {"const": {"b": [1, 2]}}, "c": {"type": "array", "items": {"type": "null"}}, "d": {}},
    "required": ["a", "c"],
    "additionalProperties": {"type": "null"},
}


def test_whitespace_is_none_or_a_space_after_each_comma_and_colon_all_through_a_text(takes: Any) -> None:
    value: Any = {"a": {"b": [1, 2]}, "c": [None, None], "d": {"e": [[], {}]}, "f": None}
    tight, spaced = json.dumps(value, separators=(",", ":")), json.dumps(value)
    compact = emit(forms_of(TWO_STYLES), compact=True)
    assert takes(TWO_STYLES, tight) and takes(TWO_STYLES, spaced)
    assert takes(compact, tight) and not takes(compact, spaced)
    for place in (index for index, character in enumerate(tight) if character in ",:"):
        assert not takes(TWO_STYLES, f"{tight[: place + 1]} {tight[place + 1 :]}"), "the styles are not mixed"
    for place in range(len(spaced)):
        if spaced[place] in "{}[],: ":
            for blank in " \n\t":
                assert not takes(TWO_STYLES, f"{spaced[:place]}{blank}{spaced[place:]}")


def test_unique_items_of_few_values(takes: Any) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 2}
    assert takes(schema, '["b", "a"]') and takes(schema, '[3,"a","b"]')
    assert not any(takes(schema, text) for text in ('["a"]', '["a", "a"]', '["a", 3, "a"]', "[]"))


def test_other_keys_are_other_keys(takes: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "integer"}},
        "patternProperties": {"^x-": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    }
    assert takes(schema, '{"name": 1, "x-a": null, "nam": true, "names": false}')
    for text in ('{"name": true}', '{"x-a": true}', '{"nam": null}', '{"name": 1, "name": true}'):
        assert not takes(schema, text), text


def test_counts_of_members(takes: Any) -> None:
    schema = {
        "type": "object",
        "properties": {name: {} for name in "abc"},
        "minProperties": 2,
        "maxProperties": 3,
    }
    assert (
        takes(schema, '{"a": 1, "c": 1}') and takes(schema, '{"b": 1, "z": 1}') and takes(schema, '{"a":1,"b":1,"q":1}')
    )
    assert not takes(schema, '{"a": 1}') and not takes(schema, '{"z": 1, "z": 1}')
    assert not takes(schema, '{"a":1,"b":1,"c":1,"d":1}')
    with pytest.raises(Unsupported, match="twice"):
        emit(forms_of({"type": "object", "minProperties": 2}))


def test_recursion(takes: Any) -> None:
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "additionalProperties": False}
    schema = {"$defs": {"N": node}, "$ref": "#/$defs/N"}
    text = "{}"
    for _ in range(50):
        text = f'{{"n": {text}}}'
    assert takes(schema, text) and not takes(schema, text[:-1])


@pytest.mark.parametrize("source", ["[a-z]{2,3}", "a|ab|abc", "(?=.*b)[abc]{2,3}", "(ab)*c?", "[0-9]+(\\.[0-9]+)?", ""])
def test_expressions_match_as_a_whole(takes: Any, source: str) -> None:
    emitted = emit_regex(source)
    for text in ("", "a", "ab", "abc", "bcd", "ababc", "1.5", "1.", "c", "abcd"):
        assert takes(emitted, text) == bool(re.fullmatch(source, text)), text


def test_expressions_without_a_text() -> None:
    with pytest.raises(InvalidSchema):
        emit_regex("a(?!.)b")
    with pytest.raises(Unsupported):
        emit_regex("(?:a|bc){0,500}foo.{0,500}(?:d|ef){3}")


def test_choices_and_grammars(takes: Any) -> None:
    choice = emit_choice(("yes", "yes please", 'q"\\\n', "yes"))
    assert all(takes(choice, text) for text in ("yes", "yes please", 'q"\\\n')) and not takes(choice, "yes p")
    assert takes(emit_ebnf('root ::= "a" root | "b"'), "aab") and emit_ebnf("x").is_risky


TAGS = (
    Tag(begin='<t>{"name": "f", "arguments": ', json_schema="", end="}</t>"),
    Tag(begin='<t>{"name": "g", "arguments": ', json_schema="", end="}</t>"),
)
FORMS = [
    forms_of({"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]}) for kind in ("null", "boolean")
]
F, G = '<t>{"name": "f", "arguments": {"a": null}}</t>', '<t>{"name": "g", "arguments": {"a": true}}</t>'


def test_forced_calls(takes: Any) -> None:
    source = emit_tags(Tags(tags=TAGS, forced=True, separator="\n", at_most=2), FORMS)
    assert takes(source, F) and takes(source, f"{F}\n{G}") and takes(source, f"{G}\n{G}")
    for text in ("", f"{F}{G}", f"{F}\n{F}\n{F}", f"{F}\n", F.replace("null", "true"), f"x{F}"):
        assert not takes(source, text), text
    one = emit_tags(Tags(tags=TAGS, forced=True, separator=", ", opening="[", closing="]", at_most=1), FORMS)
    assert takes(one, f"[{F}]") and not takes(one, f"[{F}, {G}]") and not takes(one, "[]")


def test_calls_in_a_text(takes: Any) -> None:
    source = emit_tags(Tags(tags=TAGS, forced=False, trigger="<t>"), FORMS)
    for text in ("", "hello", f"so: {F} and {G}.", "<t", f"{F}{G}"):
        assert takes(source, text), text
    for text in ("<t>", f"so: {F[:-1]}", F.replace("null", "3"), f"{F} <t>x"):
        assert not takes(source, text), text
    with pytest.raises(Unsupported, match="trigger"):
        emit_tags(Tags(tags=TAGS, forced=False, trigger="<x>"), FORMS)


def test_structural_tags(takes: Any) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "string", "pattern": '^"x$'}}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    source = structural_tag.emit(
        json.dumps({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}})
    )
    assert takes(source, 'a <f>"\\"x"</f> b') and not takes(source, 'a <f>""x"</f>')


SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "null"}},
    "required": ["a"],
    "additionalProperties": False,
}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
BARE_TAG = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
NEW_TAG = {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [BARE_TAG]}}


@pytest.mark.parametrize("tag", [OLD_TAG, NEW_TAG], ids=["older", "without type"])
@pytest.mark.parametrize("spelling", ["response_format", "structured_outputs", "structural_tag"])
def test_structural_tags_as_requests_spell_them(takes: Any, spelling: str, tag: dict[str, Any]) -> None:
    """From the fields of a request to what a text may be."""
    whole = {"type": "structural_tag", **tag}
    fields = {spelling: {"structural_tag": whole} if spelling == "structured_outputs" else whole}
    constraint = ConstraintFields.model_validate(fields).constraint(GrammarDefaults())
    assert constraint is not None
    (source,) = prepare(constraint).grammar.sources
    assert takes(source, 'a <f>{"a": null}</f> b')
    assert not takes(source, 'a <f>{"a": 1}</f> b')
