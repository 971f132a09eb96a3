"""Tool calls: forced and amid free text, in brackets and without, one kind and several."""

import json

import pytest

from tests.grammar.matching import accepts, allowed, follow, small_vocabulary
from trunkline.constraint import Constraint, Tag, Tags
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.emitter import Parts, emit_tags
from trunkline.grammar.backends.llguidance.lark import MARK
from trunkline.grammar.backends.llguidance.tags import Way, either
from trunkline.grammar.interface import CompiledGrammar, Unsupported
from trunkline.grammar.prepared_cache import PreparedCache
from trunkline.grammar.schema.forms import NEVER, Forms, Numbers, Objects

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)

WITH_NUMBER = Forms(
    definitions={
        "root": (Objects(properties=(("n", "integer"),), required=frozenset("n"), additional=NEVER),),
        "integer": (Numbers(integer=True),),
    },
    root="root",
)
WITHOUT_ANY = Forms(definitions={"root": (Objects(additional=NEVER),)}, root="root")
ARGUMENTS = {"add": '{"n": 1}', "add_all": "{}"}  # one name begins as the other


def tag(name: str, begin: str = "", end: str = "") -> Tag:
    return Tag(begin=f'{begin}{{"name": "{name}", "arguments": ', json_schema="{}", end="}" + end)


def call(name: str, begin: str = "", end: str = "") -> str:
    return f'{begin}{{"name": "{name}", "arguments": {ARGUMENTS[name]}}}{end}'


def compiled(**tags: object) -> CompiledGrammar:
    return BACKEND.compile(emit_tags(Tags(**tags), [WITH_NUMBER, WITHOUT_ANY], compact=False))  # type: ignore[arg-type]


def check(grammar: CompiledGrammar, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not accepts(grammar, VOCABULARY, text)] == []
    assert [text for text in no if accepts(grammar, VOCABULARY, text)] == []


# <tool_call> … </tool_call>

B, E = "<tool_call>\n", "\n</tool_call>"
HERMES = (tag("add", B, E), tag("add_all", B, E))
ADD, ALL = call("add", B, E), call("add_all", B, E)


def test_arguments_in_any_order():
    pair = Forms(
        definitions={
            "root": (Objects(properties=(("n", "integer"), ("m", "integer")), additional=NEVER),),
            "integer": (Numbers(integer=True),),
        },
        root="root",
    )
    in_order, turned, twice = (
        f'{B}{{"name": "add", "arguments": {{{members}}}}}{E}'
        for members in ('"n": 1, "m": 2', '"m": 2, "n": 1', '"n": 1, "n": 1')
    )
    for key_order, yes in (("schema", [in_order]), ("any", [in_order, turned])):
        tags = Tags(tags=HERMES[:1], forced=True, at_most=1)
        grammar = BACKEND.compile(emit_tags(tags, [pair], compact=False, key_order=key_order))
        assert [text for text in (in_order, turned, twice) if accepts(grammar, VOCABULARY, text)] == yes


def test_forced():
    check(
        compiled(tags=HERMES, forced=True, separator="\n"),
        [ADD, ALL, f"{ADD}\n{ALL}", f"{ALL}\n{ALL}\n{ADD}", ADD.replace('"n": ', '"n":')],
        [
            "",
            "x" + ADD,
            ADD + "\n",
            ADD + ALL,
            ADD + "x",
            ADD.replace("1", "true"),
            ADD.replace("add", "add_all"),
            ADD[:-1],
        ],
    )


def test_what_is_the_same_in_all_tags_is_forced():
    matcher = compiled(tags=HERMES, forced=True).matcher()
    assert b"".join(VOCABULARY.tokens[token] for token in matcher.forced()) == f'{B}{{"name": "add'.encode()


@pytest.mark.parametrize("at_most", [1, 2, 3])
def test_no_more_than_so_many(at_most):
    grammar = compiled(tags=HERMES, forced=True, separator="\n", at_most=at_most)
    for count in range(1, 5):
        assert accepts(grammar, VOCABULARY, "\n".join([ADD, ALL, ADD, ADD][:count])) == (count <= at_most)


def test_amid_free_text():
    check(
        compiled(tags=HERMES, forced=False, trigger="<tool_call>", separator="\n"),
        [
            "",
            "hello <tool",
            "é<tool_cal",
            f"hello {ADD}",
            f"{ADD}\n{ALL}",
            f"{ADD} and {ALL}{ADD} there\n",
            "</tool_call>",
        ],
        [
            "<tool_call>",
            "a <tool_call> b",
            ADD[:-1],
            f"{ADD}<tool_call>",
            f"x{ADD.replace('1', 'null')}",
            "<<tool_call>\n",
        ],
    )


def test_amid_free_text_no_more_than_so_many():
    check(
        compiled(tags=HERMES, forced=False, trigger="<tool_call>", separator="\n", at_most=1),
        ["hello", f"hello {ADD} bye <tool_cal"],
        [f"{ADD}{ADD}", f"{ADD} <tool_call>", f"{ADD}\n{ALL}"],
    )
    check(compiled(tags=HERMES, forced=False, trigger="<tool_call>", at_most=0), ["hello"], [ADD, "<tool_call>"])


def test_after_the_trigger_only_a_call_may_follow():
    matcher = compiled(tags=HERMES, forced=False, trigger="<tool_call>").matcher()
    assert follow(matcher, VOCABULARY, b"hi <tool_call>")
    assert allowed(matcher, VOCABULARY) == {b"\n"}
    assert not matcher.is_complete


# one opening and one closing around all: [TOOL_CALLS][…, …]

PLAIN = (tag("add"), tag("add_all"))
ONE, TWO = call("add"), call("add_all")


def test_brackets_around_all_tags():
    brackets = {"opening": "[CALLS][", "separator": ", ", "closing": "]", "trigger": "[CALLS]"}
    check(
        compiled(tags=PLAIN, forced=True, **brackets),
        [f"[CALLS][{ONE}]", f"[CALLS][{ONE}, {TWO}, {ONE}]"],
        ["[CALLS][]", f"[CALLS][{ONE}", f"[CALLS][{ONE}]]", f"[CALLS][{ONE},{TWO}]", ONE],
    )
    check(
        compiled(tags=PLAIN, forced=False, **brackets),
        ["hi", f"hi [CALLS][{ONE}, {TWO}] and [CALLS][{ONE}].", "[CALLS"],
        [f"[CALLS][{ONE}", "[CALLS]", f"[CALLS][{ONE}] [CALLS]"],
    )
    check(
        compiled(tags=PLAIN, forced=False, at_most=2, **brackets),
        [f"[CALLS][{ONE}, {TWO}] and", f"[CALLS][{ONE}] [CALLS][{ONE}]"],
        [
            f"[CALLS][{ONE}, {TWO}] [CALLS][{ONE}]",
            f"[CALLS][{ONE}, {TWO}, {ONE}]",
            f"[CALLS][{ONE}] [CALLS][{ONE}, {ONE}]",
        ],
    )


def test_an_opening_without_a_closing():
    """Behind a tag, free text may not begin as another tag would."""
    check(
        compiled(tags=PLAIN, forced=False, trigger="[CALLS]", opening="[CALLS]", separator="; "),
        [
            f"x [CALLS]{ONE}; {TWO}",
            f"[CALLS]{ONE}; {TWO} and",
            f"[CALLS]{ONE} [CALLS]{TWO}",
            f"[CALLS]{ONE}; foo",
            f"[CALLS]{ONE};",
        ],
        [
            f"[CALLS]{ONE}; " + '{"name": "add", "arguments": x',
            f"[CALLS]{ONE}; " + '{"name": "add',
            f"[CALLS]{ONE[:-1]}",
        ],
    )


def test_calls_are_refused_that_the_trigger_would_not_find():
    for trigger in ("", "<other>"):
        with pytest.raises(Unsupported):
            compiled(tags=HERMES, forced=False, trigger=trigger)
    with pytest.raises(Unsupported):
        compiled(tags=HERMES, forced=True, at_most=0)
    with pytest.raises(Unsupported):
        compiled(tags=HERMES, forced=True, at_most=100_000)


def test_each_tag_has_a_schema_of_its_own():
    grammar = compiled(tags=HERMES, forced=True)
    swapped = ADD.replace(json.dumps({"n": 1}), "{}")
    check(grammar, [ADD, ALL], [swapped])


@pytest.mark.parametrize(
    ("literals", "rule"),
    [
        (["ab", "ac", "d"], '("a" ("b" x0 | "c" x1) | "d" x2)'),
        (["a", "ab"], '"a" (x0 | "b" x1)'),
        (["", "a"], '(x0 | "a" x1)'),
        (["abc"], '"abc" x0'),
    ],
)
def test_literals_share_their_beginnings(literals, rule):
    assert either([Way(literal, f"x{number}") for number, literal in enumerate(literals)]) == rule


# What is written once


def test_parts_are_written_once_and_told_apart() -> None:
    parts = Parts()
    first = parts.write(WITH_NUMBER, False, "schema")
    assert parts.write(WITH_NUMBER, False, "schema") is first
    assert parts.write(WITH_NUMBER, True, "schema") != first
    assert parts.num_written == 2
    twins = (tag("add", B, E), tag("add_all", B, E))
    source = emit_tags(Tags(tags=twins, forced=True), [WITH_NUMBER, WITH_NUMBER], compact=False)
    assert MARK not in source.text
    check(BACKEND.compile(source), [ADD, ADD.replace("add", "add_all")], [ALL, ADD.replace("1", "true")])


def test_parts_are_bounded() -> None:
    size = Parts()
    size.write(WITH_NUMBER, False, "schema")
    parts = Parts(max_characters=size.num_characters)
    for forms in (WITH_NUMBER, WITHOUT_ANY, WITH_NUMBER):
        parts.write(forms, False, "schema")
        assert 0 < parts.num_characters <= size.num_characters
    assert parts.num_written == 3


def test_the_same_is_written_whatever_was_written_before() -> None:
    """Rules with names of their own, and those that many schemas share."""
    kinds = {"enum": ["a", "b"]}
    schemas = [
        {"type": "array", "items": kinds, "uniqueItems": True},
        {
            "type": "object",
            "properties": {"a": kinds, "b": {"type": "array", "contains": kinds, "items": {"type": "string"}}},
        },
    ]
    texts = [json.dumps(schema) for schema in schemas]
    cache = PreparedCache()
    for which in ([0], [1, 0], [0, 1], [1, 1, 0]):
        tags = tuple(Tag(begin=f"<{at}>", json_schema=texts[number], end="</>") for at, number in enumerate(which))
        grammar = cache.prepare(Constraint(tags=Tags(tags=tags, forced=True))).grammar
        compiled = BACKEND.compile(grammar.sources[0])
        for at, number in enumerate(which):
            for text in (['["a","b"]', "[]"], ['{"a":"b","b":["x","a"]}', "{}"])[number]:
                assert accepts(compiled, VOCABULARY, f"<{at}>{text}</>")
            for text in (['["a","a"]', '["c"]'], ['{"a":"c"}', '{"b":["x"]}'])[number]:
                assert not accepts(compiled, VOCABULARY, f"<{at}>{text}</>")
