"""The shortest legal endings: what is found is legal, short, always the same, and kept up to date token by token."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import grammar_rows
from tests.grammar.matching import mask_of, small_vocabulary
from trunkline.constraint import GrammarSource
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.outlines.backend import OutlinesBackend
from trunkline.grammar.backends.xgrammar.backend import XgrammarBackend
from trunkline.grammar.closing import Ending, find_ending
from trunkline.grammar.interface import CompiledGrammar, Matcher
from trunkline.grammar.measure import allowed_ids
from trunkline.grammar.vocabulary import Vocabulary

WORDS = (
    "hello",
    "name",
    "age",
    "true",
    "false",
    "null",
    '{"',
    '":',
    '","',
    '"}',
    '""',
    "[]",
    "{}",
    '"]',
    "}}",
    " the",
    "abcdefgh",
)
VOCABULARY = small_vocabulary(words=WORDS)
BACKEND = LlguidanceBackend(VOCABULARY)
MOST = 200


def grammar(parts: dict[str, Any]) -> CompiledGrammar:
    return BACKEND.compile(GrammarSource("llguidance", "grammar", json.dumps({"grammars": [parts]})))


def schema_grammar(schema: Any) -> CompiledGrammar:
    return grammar({"json_schema": {"x-guidance": {"whitespace_pattern": "[ \\n]{0,2}"}, **schema}})


def after(compiled: CompiledGrammar, text: str) -> Matcher:
    matcher = compiled.matcher()
    for token in VOCABULARY.encode(text.encode()):
        assert matcher.accept(token)
    return matcher


def spelled(ending: list[int] | None) -> list[str] | None:
    return None if ending is None else [VOCABULARY.tokens[token].decode() for token in ending]


def text_of(tokens: list[int], vocabulary: Vocabulary = VOCABULARY) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"], "additionalProperties": False}}}  # fmt: skip
ORDER = {
    "type": "object",
    "properties": {
        "size": {"enum": ["extra large", "medium", "s"]},
        "when": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        "note": {"type": "string", "minLength": 3},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
        },
    },
    "required": ["size", "when", "note", "where"],
}
SCHEMAS: list[Any] = [PERSON, LIST, ORDER, {"type": "array", "minItems": 2, "items": {"type": "boolean"}}, {"type": "string", "minLength": 50}, {}]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "so_far", "ending"),
    [
        (PERSON, "", ['{"', "name", '":', '"}', '","', "age", '":', "0", "}"]),
        (PERSON, '{"name": "Al', ['","', "age", '":', "0", "}"]),
        (PERSON, '{"name": "Al", "age": 4', ["}"]),
        (PERSON, '{"name": "Al", "age": 4, "tags": ["hello', ['"]', "}"]),
        (PERSON, '{"name":"","age":0}', []),
        (LIST, '{"value": 1, "next": {"value": 2, "next": ', ["null", "}}"]),
        ({"type": "array", "minItems": 2, "items": {"type": "boolean"}}, "[true", [",", "false", "]"]),
        ({"type": "string", "minLength": 20}, '"', ["abcdefgh", "abcdefgh", "abcdefgh", '"']),
        ({"enum": ["extra large", "medium", "s"]}, "", ['"', "s", '"']),
        ({"type": "integer", "minimum": 100}, "", ["1", "0", "0"]),
    ],
)  # fmt: skip
def test_endings_of_json(schema: Any, so_far: str, ending: list[str]) -> None:
    matcher = after(schema_grammar(schema), so_far)
    assert spelled(find_ending(matcher, VOCABULARY, most=MOST)) == ending


@pytest.mark.parametrize(
    ("regex", "so_far", "most"),
    [
        ("[a-z]{5,10}", "", 1),
        ("(foo|ba)+!", "foof", 3),
        ("[0-9]+-[0-9]+", "12", 2),
        (".*q.*", "abc", 2),
        ("(ab)*", "a", 1),
    ],
)
def test_endings_of_what_is_no_json(regex: str, so_far: str, most: int) -> None:
    matcher = after(grammar({"lark_grammar": f"start: /{regex}/"}), so_far)
    ending = find_ending(matcher, VOCABULARY, most=MOST)
    assert ending is not None and len(ending) <= most


def test_a_grammar_whose_longest_tokens_lead_nowhere() -> None:
    matcher = after(grammar({"lark_grammar": 'start: "(" start ")" | "[" start "]" | "x"'}), "([(")
    assert text_of(find_ending(matcher, VOCABULARY, most=MOST) or []) == "x)])"


def test_no_ending_within_the_limit() -> None:
    compiled = schema_grammar(PERSON)
    shortest = find_ending(compiled.matcher(), VOCABULARY, most=MOST)
    assert shortest is not None
    assert find_ending(compiled.matcher(), VOCABULARY, most=len(shortest)) == shortest
    assert find_ending(compiled.matcher(), VOCABULARY, most=len(shortest) - 1) is None


def shortest_length(matcher: Matcher, most: int) -> int | None:
    """By trying all that may follow: what `find_ending` is measured by."""
    level = [matcher]
    for length in range(most + 1):
        if any(ahead.is_complete for ahead in level):
            return length
        following = []
        for ahead in level:
            for token in sorted(mask_of(ahead, VOCABULARY) - set(VOCABULARY.eos_token_ids)):
                fork = ahead.fork()
                if fork.accept(token):
                    following.append(fork)
        level = following
    return None


@pytest.mark.parametrize(
    ("parts", "so_far"),
    [
        ({"lark_grammar": 'start: "a" b | "c" ("d" | "e" start)\nb: "b" b | "!"'}, ""),
        ({"lark_grammar": 'start: "(" start ")" | start2\nstart2: "[" start "]" | "true" | "null"'}, "[("),
        ({"lark_grammar": "start: /(hello|name){2}(age|h)?/"}, "he"),
        ({"json_schema": {"enum": [[1, "a"], [12], {"name": None}], "x-guidance": {"whitespace_flexible": False}}}, ""),
        ({"json_schema": {"anyOf": [{"const": "abcdef"}, {"const": "xyz"}, {"const": [True]}], "x-guidance": {"whitespace_flexible": False}}}, ""),
    ],
)  # fmt: skip
def test_they_are_about_as_short_as_can_be(parts: Any, so_far: str) -> None:
    matcher = after(grammar(parts), so_far)
    ending = find_ending(matcher, VOCABULARY, most=MOST)
    assert ending is not None
    shortest = shortest_length(matcher, 8)
    assert shortest is not None and shortest <= len(ending) <= shortest + 1


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_matcher_stays_and_the_answer_is_always_the_same(schema: Any) -> None:
    compiled = schema_grammar(schema)
    matcher = compiled.matcher()
    before = mask_of(matcher, VOCABULARY)
    ending = find_ending(matcher, VOCABULARY, most=MOST)
    assert mask_of(matcher, VOCABULARY) == before
    assert find_ending(compiled.matcher(), VOCABULARY, most=MOST) == ending


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xgrammar", "outlines"])
def test_any_backend_will_do(name: str) -> None:
    sources: dict[str, tuple[Any, str, str]] = {
        "xgrammar": (XgrammarBackend, "ebnf", 'root ::= "(" root ")" | "[" [0-9]+ "]"'),
        "outlines": (OutlinesBackend, "regex", r"\([a-z]{3}:[0-9]{2,4}\)"),
    }
    make, kind, text = sources[name]
    matcher = make(VOCABULARY).compile(GrammarSource(name, kind, text)).matcher()
    before = mask_of(matcher, VOCABULARY)
    ending = find_ending(matcher, VOCABULARY, most=MOST)
    assert ending is not None and len(ending) <= 8
    assert mask_of(matcher, VOCABULARY) == before
    assert all(matcher.accept(token) for token in ending) and matcher.is_complete


# -------------------------------------------------------------------- kept up to date


def write(
    compiled: CompiledGrammar, vocabulary: Vocabulary, shortest: list[int], most: int, rng: random.Random
) -> Iterator[Ending]:
    """A text of at most `most` tokens, chosen at random as far as an ending fits after them: what a request does."""
    matcher = compiled.matcher()
    ending = Ending(matcher, vocabulary, shortest)
    ends, row = set(vocabulary.eos_token_ids), np.zeros(vocabulary.num_words, np.int32)
    for left in range(most, -1, -1):
        assert ending.length is not None and ending.length <= left
        yield ending
        matcher.fill(row)
        choices = [token for token in allowed_ids(row).tolist() if token not in ends]
        if not choices or (matcher.is_complete and (not left or rng.random() < 0.2)):
            break
        token = rng.choice(choices)
        length = ending.propose(token)
        if length is None or length > left - 1:
            if not ending.tokens:
                break  # the text is complete, and there is no room for more
            token = ending.tokens[0]
            assert ending.propose(token) == len(ending.tokens) - 1
        ending.commit()
        assert matcher.accept(token)
    assert matcher.is_complete


@given(st.sampled_from(SCHEMAS), st.integers(0, 40), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_a_text_always_ends_in_time(schema: Any, more: int, rng: random.Random) -> None:
    compiled = schema_grammar(schema)
    shortest = find_ending(compiled.matcher(), VOCABULARY, most=MOST)
    assert shortest is not None
    for ending in write(compiled, VOCABULARY, shortest, len(shortest) + more, rng):
        ahead = ending.matcher.fork()
        assert all(ahead.accept(token) for token in ending.tokens or ()) and ahead.is_complete


def test_a_proposal_changes_nothing_until_it_is_committed() -> None:
    matcher = after(schema_grammar(PERSON), '{"name": "Al", "age": 4')
    ending = Ending(matcher, VOCABULARY)
    before = mask_of(matcher, VOCABULARY)
    comma, x = (VOCABULARY.encode(text)[0] for text in (b",", b"x"))
    length = ending.propose(comma)
    assert length is not None and length > 1
    assert ending.propose(x) is None
    assert ending.length == 1 and mask_of(matcher, VOCABULARY) == before
    assert ending.propose(comma) == length
    ending.commit()
    assert ending.length == length


def test_accepting_is_proposing_and_committing() -> None:
    compiled = schema_grammar(PERSON)
    proposed, accepted = Ending(compiled.matcher(), VOCABULARY), Ending(compiled.matcher(), VOCABULARY)
    for token in VOCABULARY.encode(b'{"name": "hello the", "age": 12}'):
        proposed.propose(token)
        proposed.commit()
        for ending in (proposed, accepted):
            assert ending.matcher.accept(token)
        accepted.accept(token)
        assert accepted.tokens == proposed.tokens
    assert accepted.tokens == []


class CountedMatcher:
    """A matcher that counts the masks that are filled for it and its forks."""

    def __init__(self, inner: Matcher, masks: "itertools.count[int]") -> None:
        self._inner = inner
        self._masks = masks

    def fill(self, row: Any) -> None:
        next(self._masks)
        self._inner.fill(row)

    def fork(self) -> "CountedMatcher":
        return CountedMatcher(self._inner.fork(), self._masks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_within_a_string_nothing_is_searched() -> None:
    masks = itertools.count()
    matcher: Any = CountedMatcher(after(schema_grammar(PERSON), '{"name": "'), masks)
    ending = Ending(matcher, VOCABULARY)
    before = next(masks)
    for token in VOCABULARY.encode(b"hello the age of null, hello"):
        assert ending.propose(token) == ending.length
        ending.commit()
        assert matcher.accept(token)
    assert next(masks) == before + 1


def bench_schemas() -> list[Any]:
    """Parameters of functions that people wrote."""
    schemas = [tool["function"]["parameters"] for row in grammar_rows("bfcl_sample") for tool in row["tools_openai"]]
    glaive = [row["schema"] for row in grammar_rows("jsonschemabench_sample") if row["id"].startswith("Glaive")]
    return schemas + [schema if isinstance(schema, dict) else json.loads(schema) for schema in glaive]


@pytest.mark.slow
def test_every_limit_from_the_least_on_is_kept() -> None:
    """40 schemas, max_tokens from the least to 40 more (every one for some), with tokens chosen at random."""
    rng = random.Random(4)
    tried = 0
    for schema in rng.sample(bench_schemas(), 60):
        try:
            compiled = schema_grammar(schema)
        except ValueError:
            continue
        shortest = find_ending(compiled.matcher(), VOCABULARY, most=MOST)
        if shortest is None:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        validator.validate(json.loads(text_of(shortest)))
        for more in range(41) if tried < 8 else (0, 1, 2, 5, 11, 23, 40):
            text = compiled.matcher()
            for ending in write(compiled, VOCABULARY, shortest, len(shortest) + more, rng):
                text = ending.matcher
            assert text.is_complete
        tried += 1
    assert tried >= 40


@pytest.mark.slow
def test_the_least_is_near_the_shortest_text_that_one_would_write() -> None:
    """Compared with the least value of each required property, without blanks, as the tokenizer spells it."""
    found = written = 0
    for schema in bench_schemas():
        text = json.dumps(least(schema, schema), separators=(",", ":"))
        if list(jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text))):
            continue
        try:
            ending = find_ending(schema_grammar(schema).matcher(), VOCABULARY, most=MOST)
        except ValueError:
            continue
        assert ending is not None
        found += len(ending)
        written += len(VOCABULARY.encode(text.encode()))
    assert written > 1000
    assert found <= 1.02 * written


def least(schema: Any, root: Any) -> Any:
    """A small value, by simple rules; it may be none that is valid."""
    if "enum" in schema:
        return min(schema["enum"], key=lambda value: len(json.dumps(value)))
    kind = schema.get("type", "integer")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        needed = schema.get("required", [])
        return {key: least(part, root) for key, part in schema.get("properties", {}).items() if key in needed}
    return {"string": "", "integer": 0, "number": 0, "boolean": True, "array": [], "null": None}.get(kind)


def test_a_mask_beyond_the_vocabulary_is_never_read() -> None:
    """Ids that the model has and the tokenizer doesn't."""
    vocabulary = small_vocabulary(num_logits=1000)
    compiled = LlguidanceBackend(vocabulary).compile(
        GrammarSource("llguidance", "grammar", json.dumps({"grammars": [{"json_schema": PERSON}]}))
    )
    ending = find_ending(compiled.matcher(), vocabulary, most=MOST)
    assert ending is not None and json.loads(text_of(ending, vocabulary)) == {"name": "", "age": 0}
    assert np.all(np.array(ending) < len(vocabulary.tokens))
