"""What grammars make models write in each dialect that they can write: compiled for real, and read back by its parser.

Slow: llguidance is loaded.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.tool_parsers.readings import Call, read
from tests.api.tool_parsers.writers import NOTATIONS
from tests.grammar.matching import SmallTokenizer, accepts, follow, random_text, small_vocabulary
from trunkline.api.tool_parsers import DIALECTS, find_dialect
from trunkline.api.tools import read_tools
from trunkline.constraint import Constraint
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.interface import CompiledGrammar
from trunkline.grammar.prepare import prepare
from trunkline.grammar.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

VOCABULARY = small_vocabulary()
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("f", "get_b")
]
FORMED = [dialect.name for dialect in DIALECTS if dialect.form is not None]
MARKED = [name for name in FORMED if find_dialect(name).markers]  # whose marks are special tokens of some models


def compiled(name: str, choice: Any, parallel: bool = True, vocabulary: Vocabulary = VOCABULARY) -> CompiledGrammar:
    use, dialect = read_tools(TOOLS, choice, parallel), find_dialect(name)
    assert use is not None
    assert dialect.form is not None
    special_tokens = dialect.markers if vocabulary is not VOCABULARY else ()
    tags = use.tags(dialect.form, special_tokens=special_tokens)
    grammar = prepare(Constraint(tags=tags, where="tools")).grammar
    (source,) = [source for source in grammar.sources if source.backend == "llguidance"]
    return LlguidanceBackend(vocabulary).compile(source)


def marked(name: str) -> tuple[Vocabulary, Callable[[str], list[int]]]:
    """A vocabulary in which the dialect's marks are special tokens, and how a model writes a text in it."""
    markers = find_dialect(name).markers
    tokenizer = SmallTokenizer(special=("<|bos|>", "<|eos|>", *markers))
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    pattern = re.compile(f"({'|'.join(map(re.escape, sorted(markers, key=len, reverse=True)))})")

    def encode(text: str) -> list[int]:
        ids = []
        for part in pattern.split(text):
            special = vocabulary.special_id(part)
            ids += vocabulary.encode(part.encode()) if special is None else [special]
        return ids

    return vocabulary, encode


def written(name: str, *calls: tuple[str, Any]) -> str:
    return NOTATIONS[name].write(list(calls))


@pytest.mark.parametrize("name", FORMED)
def test_forced_calls_are_those_of_the_model(name: str) -> None:
    forced, single = compiled(name, "required"), compiled(name, "required", parallel=False)
    one, two = written(name, ("f", {"a": 1})), written(name, ("f", {"a": 1}), ("get_b", {"a": 2}))
    if name != "kimi_k2":  # whose second call has another number there, which the parser sees to
        assert accepts(forced, VOCABULARY, two)
    assert accepts(forced, VOCABULARY, one)
    assert accepts(single, VOCABULARY, one)
    assert not accepts(single, VOCABULARY, two)
    assert not accepts(forced, VOCABULARY, written(name, ("g", {"a": 1})))
    assert not accepts(forced, VOCABULARY, written(name, ("f", {"a": "x"})))
    assert not accepts(forced, VOCABULARY, f"Well, {one}")


@pytest.mark.parametrize("name", FORMED)
def test_what_is_written_at_random_is_read(name: str) -> None:
    grammar = compiled(name, "required")
    texts = [random_text(grammar, VOCABULARY, seed) for seed in range(8)]
    assert any(texts)
    for text in filter(None, texts):
        reading = read(find_dialect(name), text.decode())
        assert reading.content == ""
        assert reading.calls
        for call in reading.calls:
            assert (call.name in ("f", "get_b"), call.is_complete) == (True, True)
            assert 0 <= json.loads(call.arguments)["a"] <= 9


@pytest.mark.parametrize("name", [name for name in FORMED if name != "json"])
def test_text_is_free_until_the_trigger(name: str) -> None:
    free = compiled(name, "auto")
    one = written(name, ("f", {"a": 1}))
    for text in ("Well.", one, f"Well, {one}"):
        assert accepts(free, VOCABULARY, text), text
    assert not accepts(free, VOCABULARY, written(name, ("f", {"a": "x"})))
    assert read(find_dialect(name), f"Well, {one}").calls == [Call("f", '{"a": 1}')]


@pytest.mark.parametrize("name", MARKED)
def test_marks_that_are_special_tokens_are_forced_as_such(name: str) -> None:
    vocabulary, encode = marked(name)
    grammar = compiled(name, "required", vocabulary=vocabulary)
    one = written(name, ("f", {"a": 1}))
    matcher = grammar.matcher()
    assert follow(matcher, vocabulary, encode(one))
    assert matcher.is_complete
    has_marks = encode(one) != vocabulary.encode(one.encode())
    assert has_marks != follow(grammar.matcher(), vocabulary, vocabulary.encode(one.encode()))
    assert not follow(grammar.matcher(), vocabulary, encode(written(name, ("f", {"a": "x"}))))
    for seed in range(4):
        if (text := random_text(grammar, vocabulary, seed)) is not None:
            reading = read(find_dialect(name), text.decode())
            assert (reading.content, bool(reading.calls)) == ("", True)


@pytest.mark.parametrize("name", MARKED)
def test_text_is_free_until_a_call_that_special_tokens_mark(name: str) -> None:
    vocabulary, encode = marked(name)
    free = compiled(name, "auto", vocabulary=vocabulary)
    one = written(name, ("f", {"a": 1}))
    for text in ("Well.", one, f"Well, {one}", f"{one}\n{one}"):
        matcher = free.matcher()
        assert follow(matcher, vocabulary, encode(text)), text
        assert matcher.is_complete
    assert not follow(free.matcher(), vocabulary, encode(f"Well, {written(name, ('f', {'a': 'x'}))}"))


def test_harmony_says_more_in_its_channels() -> None:
    vocabulary, encode = marked("openai")
    free = compiled("openai", "auto", vocabulary=vocabulary)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = written("openai", ("f", {"a": 1}))
    for text in (f"{thought}<|channel|>final<|message|>Yes.", thought + call):
        matcher = free.matcher()
        assert follow(matcher, vocabulary, encode(text)), text
        assert matcher.is_complete
    before = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
    assert not follow(free.matcher(), vocabulary, encode(f'{before}{{"a": "x"}}'))


def test_llama_may_write_its_tag() -> None:
    vocabulary, encode = marked("llama3_json")
    free = compiled("llama3_json", "auto", vocabulary=vocabulary)
    assert follow(free.matcher(), vocabulary, encode('<|python_tag|>{"name": "f", "parameters": {"a": 1}}'))
    assert not follow(free.matcher(), vocabulary, encode('<|python_tag|>{"name": "f", "parameters": {"a": "x"}}'))
