"""Calls, or JSON instead (`Tags.instead`), and which parts of tags may be left out: what the tools of a request rest on."""

from typing import Any

import pytest

from tests.grammar.matching import accepts
from tests.tiny import tiny_model
from trunkline.constraint import Constraint, Tag, Tags
from trunkline.grammar.backends import registry
from trunkline.grammar.interface import GrammarRefused
from trunkline.grammar.prepare import prepare
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.tokenizer import Tokenizer, load_tokenizer

NUMBER = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
WORD = (
    '{"type": "object", "properties": {"name": {"enum": ["x"]}}, "required": ["name"], "additionalProperties": false}'
)
NEVER = '{"type": "object", "properties": {"a": {"type": "string", "pattern": "(a|b)\\\\1"}}, "required": ["a"]}'


def tags(begin: str = '<call>{"name": "f", "arguments": ', **fields: Any) -> Tags:
    tag = Tag(begin=begin, json_schema=NUMBER, end="}", where="tools[0]", name="f")
    instead = Tag(begin="", json_schema=WORD, end="", where="response_format", name="r")
    return Tags(**{"tags": (tag,), "forced": True, "separator": ";", "instead": instead, **fields})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(tiny_model(tmp_path_factory.mktemp("tiny"))))


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
def test_calls_or_json_and_nothing_else(tokenizer: Tokenizer, backend: str) -> None:
    prepared = prepare(Constraint(tags=tags(), backend=backend))
    assert [where for where, _ in prepared.checks] == ["tools[0]", "response_format"]
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    grammar = registry.make(backend, vocabulary).compile(prepared.grammar.sources[0])
    call = '<call>{"name": "f", "arguments": {"a":1}}'
    for text in ('{"name":"x"}', '{"name": "x"}', call, f"{call};{call}"):
        assert accepts(grammar, vocabulary, text), text
    for text in ("", '{"name":"y"}', '{"a":1}', f"{call};", f'{call}{{"name":"x"}}', 'so: {"name":"x"}'):
        assert not accepts(grammar, vocabulary, text), text


def test_calls_that_begin_as_json_does_go_to_a_backend_that_goes_back() -> None:
    """llguidance would take the JSON for a call at its first brace, and never come back."""
    prepared = prepare(Constraint(tags=tags('{"name": "f", "arguments": ')))
    assert [source.backend for source in prepared.grammar.sources] == ["xgrammar"]


def test_of_strict_parts_nothing_is_left_out() -> None:
    def constraint(**fields: Any) -> Constraint:
        tag = Tag(begin="<call>", json_schema=NEVER, end="</call>", where="tools[0]", **fields)
        return Constraint(tags=tags(tags=(tag,)), unsupported="validate")

    loose = prepare(constraint())
    assert [finding.keyword for finding in loose.findings] == ["pattern"]
    with pytest.raises(GrammarRefused) as caught:
        prepare(constraint(strict=True))
    assert caught.value.param == "tools[0]"
    other = Tag(begin="", json_schema=NEVER, end="", where="response_format", strict=True)
    with pytest.raises(GrammarRefused) as caught:
        prepare(Constraint(tags=tags(instead=other), unsupported="validate"))
    assert caught.value.param == "response_format"
