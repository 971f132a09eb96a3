"""What requests say their answers must follow: every spelling becomes one constraint, and every mistake is named."""

import json
import re
from typing import Any

import pytest

from trunkline.api.grammar_routes import GrammarCheckRequest
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.response_format import GrammarDefaults, grammar_fields, refuse_misspelt
from trunkline.constraint import Constraint
from trunkline.errors import InvalidParameter
from trunkline.grammar.prepare import prepare

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TEXT = json.dumps(SCHEMA)
NAMED = {"name": "it", "schema": SCHEMA}
GBNF = 'root ::= "a" b\nb ::= "c"'
LARK = "start: /[0-9]+/"
DEFAULTS = GrammarDefaults()


def constraint(defaults: GrammarDefaults = DEFAULTS, **fields: Any) -> Constraint | None:
    """Of a chat; a completion with the same fields has the same."""
    chat = ChatRequest.parse({"messages": [{"role": "user", "content": "hi"}], **fields})
    completion = CompletionRequest.parse({"prompt": "hi", **fields})
    found = chat.sampling({}, defaults).constraint
    assert completion.sampling({}, defaults).constraint == found
    return found


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {**NAMED, **fields}}


TAGGED = {"type": "triggered_tags", "triggers": ["<f"], "tags": []}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<g>", "end": "</g>"}],
    "triggers": ["<"],
}
LEGACY_AS_NEW = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [
            {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
            {"type": "tag", "begin": "<g>", "content": {"type": "json_schema", "json_schema": True}, "end": "</g>"},
        ],
    },
}

# fields of the request, and of its constraint
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True, "where": "response_format"}),
    ({"guided_json_object": True}, {"json_object": True, "where": "guided_json_object"}),
    (
        {"structural_tag": LEGACY_AS_NEW},
        {"structural_tag": json.dumps(LEGACY_AS_NEW), "where": "structural_tag"},
    ),
    (
        {"response_format": json_schema()},
        {"json_schema": TEXT, "where": "response_format", "name": "it"},
    ),
    (
        {"response_format": json_schema(strict=True, description="d")},
        {"json_schema": TEXT, "strict": True, "where": "response_format", "name": "it"},
    ),
    ({"response_format": json_schema(schema=True)}, {"json_schema": "true", "where": "response_format", "name": "it"}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": TEXT, "where": "response_format"}),
    (
        {"response_format": {"type": "structural_tag", "format": TAGGED}},
        {"structural_tag": {"type": "structural_tag", "format": TAGGED}, "where": "response_format"},
    ),
    ({"response_format": LEGACY}, {"structural_tag": LEGACY_AS_NEW, "where": "response_format"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT, "where": "structured_outputs.json"}),
    ({"structured_outputs": {"json": TEXT}}, {"json_schema": TEXT, "where": "structured_outputs.json"}),
    ({"structured_outputs": {"regex": "[0-9]"}}, {"regex": "[0-9]", "where": "structured_outputs.regex"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b"), "where": "structured_outputs.choice"}),
    ({"structured_outputs": {"grammar": GBNF}}, {"ebnf": GBNF, "where": "structured_outputs.grammar"}),
    ({"structured_outputs": {"grammar": LARK}}, {"lark": LARK, "where": "structured_outputs.grammar"}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True, "where": "structured_outputs.json_object"}),
    (
        {"structured_outputs": {"structural_tag": {"format": TAGGED}}},
        {"structural_tag": {"format": TAGGED}, "where": "structured_outputs.structural_tag"},
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "backend": "guidance"}},
        {"json_schema": TEXT, "compact": True, "backend": "llguidance", "where": "structured_outputs.json"},
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "", "disable_fallback": True}},
        {"json_schema": TEXT, "compact": True, "where": "structured_outputs.json"},
    ),
    ({"guided_json": SCHEMA}, {"json_schema": TEXT, "where": "guided_json"}),
    ({"guided_json": TEXT}, {"json_schema": TEXT, "where": "guided_json"}),
    ({"guided_json": False}, {"json_schema": "false", "where": "guided_json"}),
    ({"guided_regex": "a+"}, {"regex": "a+", "where": "guided_regex"}),
    ({"guided_choice": ["a"]}, {"choice": ("a",), "where": "guided_choice"}),
    ({"choice": ["a"]}, {"choice": ("a",), "where": "choice"}),
    ({"guided_grammar": GBNF}, {"ebnf": GBNF, "where": "guided_grammar"}),
    ({"guided_grammar": LARK}, {"lark": LARK, "where": "guided_grammar"}),
    (
        {"guided_regex": "a", "guided_decoding_backend": "xgrammar:no-fallback"},
        {"regex": "a", "backend": "xgrammar", "where": "guided_regex"},
    ),
    (
        {"guided_json": SCHEMA, "guided_decoding_backend": "auto:disable-any-whitespace"},
        {"json_schema": TEXT, "compact": True, "where": "guided_json"},
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
        {"json_schema": TEXT, "compact": True, "where": "guided_json"},
    ),
    ({"json_schema": TEXT}, {"json_schema": TEXT, "where": "json_schema"}),
    ({"json_schema": SCHEMA}, {"json_schema": TEXT, "where": "json_schema"}),
    ({"regex": "a"}, {"regex": "a", "where": "regex"}),
    ({"ebnf": GBNF}, {"ebnf": GBNF, "where": "ebnf"}),
    ({"grammar": GBNF}, {"ebnf": GBNF, "where": "grammar"}),
    (
        {
            "guided_json": SCHEMA,
            "grammar_backend": "xgrammar",
            "grammar_unsupported": "validate",
            "close_on_length": True,
            "compact_json": True,
            "key_order": "any",
        },
        {
            "json_schema": TEXT,
            "backend": "xgrammar",
            "unsupported": "validate",
            "close_on_length": True,
            "compact": True,
            "key_order": "any",
            "where": "guided_json",
        },
    ),
    ({"response_format": {"type": "text"}, "regex": "a"}, {"regex": "a", "where": "regex"}),
]


@pytest.mark.parametrize(("fields", "wanted"), SPELLINGS, ids=lambda fields: json.dumps(fields)[:60])
def test_spellings(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert constraint(**fields) == Constraint(**{"unsupported": "error", **wanted})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "regex": None},
        {"grammar_backend": "outlines", "close_on_length": True, "compact_json": True, "grammar_unsupported": "error"},
    ],
)
def test_nothing_is_to_be_followed(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


def test_keys_stay_in_the_order_of_the_schema() -> None:
    one, other = (
        constraint(guided_json={"properties": dict.fromkeys(keys, True)}) for keys in (("b", "a"), ("a", "b"))
    )
    assert one is not None and one != other
    assert one.json_schema == '{"properties": {"b": true, "a": true}}'


def test_the_server_says_what_requests_leave_open() -> None:
    defaults = GrammarDefaults("xgrammar", "validate", True)
    found = constraint(defaults, regex="a")
    assert found is not None
    assert (found.backend, found.unsupported, found.close_on_length) == ("xgrammar", "validate", True)
    own = {"grammar_backend": "auto", "grammar_unsupported": "error", "close_on_length": False}
    found = constraint(defaults, regex="a", **own)
    assert found is not None
    assert (found.backend, found.unsupported, found.close_on_length) == ("auto", "error", False)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (GBNF, "ebnf"),
        ("# a comment: with a colon\n\nroot ::= x", "ebnf"),
        ("root\t::=\n  x", "ebnf"),
        ('a-b ::= ":"\nroot ::= a-b', "ebnf"),
        (LARK, "lark"),
        ('// a ::= comment\nstart: "::=" x', "lark"),
        ("?start: a | b", "lark"),
        ("%llguidance {}\n\nstart: /a/", "lark"),
        ('TEXT[stop="x"]: /a/\nstart: TEXT', "lark"),
        ("start{1}.2: x", "lark"),
    ],
)
def test_two_languages_are_told_apart(text: str, kind: str) -> None:
    assert grammar_fields(text, "guided_grammar") == {kind: text}


# fields, and the parameter that the error names
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": []}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": 1}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
    ({"response_format": json_schema(name="")}, "response_format.json_schema.name"),
    ({"response_format": json_schema(name="x" * 65)}, "response_format.json_schema.name"),
    ({"response_format": json_schema(name="x\n")}, "response_format.json_schema.name"),
    ({"response_format": json_schema(name=5)}, "response_format.json_schema.name"),
    ({"response_format": json_schema(schema="{}")}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema=None)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": json_schema(strict=1)}, "response_format.json_schema.strict"),
    ({"response_format": json_schema(stict=True)}, "response_format.json_schema.stict"),
    ({"response_format": json_schema(description=5)}, "response_format.json_schema.description"),
    ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED, "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schemas": {}}}, "response_format.schemas"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "structural_tag", "format": "x"}}, "response_format.format"),
    ({"response_format": {**LEGACY, "triggers": []}}, "response_format.triggers"),
    ({"response_format": {**LEGACY, "structures": []}}, "response_format.structures"),
    ({"response_format": {**LEGACY, "structures": [{"begin": 1}]}}, "response_format.structures[0].begin"),
    ({"response_format": {**LEGACY, "format": {}}}, "response_format.format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a"] * 10_001}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "no rule"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "backend": "lm-format-enforcer"}}, "structured_outputs.backend"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": []}, "guided_json"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [None]}, "guided_choice[0]"),
    ({"guided_grammar": 5}, "guided_grammar"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_grammar": "just words"}, "guided_grammar"),
    ({"regex": "a", "guided_decoding_backend": "nobody"}, "guided_decoding_backend"),
    ({"regex": "a", "guided_decoding_backend": "xgrammar:do-what-you-like"}, "guided_decoding_backend"),
    ({"regex": "a", "guided_decoding_backend": 5}, "guided_decoding_backend"),
    ({"regex": "a", "guided_whitespace_pattern": "[ ]?"}, "guided_whitespace_pattern"),
    ({"json_schema": 5}, "json_schema"),
    ({"regex": 5}, "regex"),
    ({"ebnf": 5}, "ebnf"),
    ({"grammar": {}}, "grammar"),
    ({"grammar": "hello"}, "grammar"),
    ({"grammar_backend": "none"}, "grammar_backend"),
    ({"grammar_backend": 5}, "grammar_backend"),
    ({"grammar_backend": "xgrammar", "guided_decoding_backend": "outlines", "regex": "a"}, "guided_decoding_backend"),
    ({"grammar_unsupported": "ignore"}, "grammar_unsupported"),
    ({"grammar_unsupported": True}, "grammar_unsupported"),
    ({"close_on_length": "yes"}, "close_on_length"),
    ({"close_on_length": 1}, "close_on_length"),
    ({"compact_json": "no"}, "compact_json"),
    ({"key_order": "random"}, "key_order"),
    ({"regex": "a", "ebnf": GBNF}, "ebnf"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda fields: json.dumps(fields)[:60])
def test_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        constraint(**fields)
    assert refused.value.param == param, refused.value
    assert refused.value.message.endswith(".")
    assert len(refused.value.message) < 600


def test_too_many_choices_are_told_in_our_words() -> None:
    with pytest.raises(InvalidParameter, match=r"allowed is a list of at most 10000 strings\.$"):
        constraint(guided_choice=["a"] * 10_001)


def test_a_schema_beside_its_type_is_told_its_place() -> None:
    message = (
        "'response_format.schema' is given, but a response_format of type 'json_schema' has it in"
        " 'response_format.json_schema.schema', beside a 'name'."
    )
    with pytest.raises(InvalidParameter, match=f"^{re.escape(message)}$"):
        constraint(response_format={"type": "json_schema", "schema": SCHEMA})


def test_a_name_is_explained() -> None:
    with pytest.raises(InvalidParameter, match="is 'a b'; allowed is 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"):
        constraint(response_format=json_schema(name="a b"))


def test_older_structural_tags_become_a_grammar() -> None:
    """They are taken by who follows them, not just read."""
    found = constraint(response_format=LEGACY)
    assert found is not None
    (source,) = prepare(found).grammar.sources
    assert (source.backend, source.kind) == ("xgrammar", "structural_tag")


OUTPUT_NAMES = (
    *("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    *("backend", "disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern"),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_choice": []}, "'guided_choice' is []; allowed is a list of at least 1 string."),
        (
            {"response_format": {**LEGACY, "structures": []}},
            "'response_format.structures' is []; allowed is a list of at least 1 structure.",
        ),
        (
            {"response_format": {"type": "text", "foo": 1}},
            "'response_format.foo' is not known; there are type, json_schema, schema, format, structures, triggers.",
        ),
        (
            {"structured_outputs": {"jsn": {}}},
            "'structured_outputs.jsn' is not known; there are " + ", ".join(OUTPUT_NAMES) + ".",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schemas": {}}}},
            "'response_format.json_schema.schemas' is not known; there are name, description, schema, strict.",
        ),
        (
            {"response_format": {**LEGACY, "structures": [{"begin": "a", "stop": "b"}]}},
            "'response_format.structures[0].stop' is not known; there are begin, schema, end.",
        ),
    ],
)
def test_mistakes_are_told_in_our_words(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        constraint(**fields)
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("guided_jsn", "guided_json"),
        ("guided_schema", "guided_"),
        ("structured_output", "structured_outputs"),
        ("response_formats", "response_format"),
        ("grammar_back", "grammar_backend"),
        ("tool_choise", "tool_choice"),
        ("json_shema", "json_schema"),
        ("regexp", "regex"),
        ("close_on_lenght", "close_on_length"),
        ("tool_" + "x" * 10_000, "tool"),
    ],
)
def test_a_typo_does_not_free_the_text(name: str, meant: str) -> None:
    for read in (ChatRequest.parse, CompletionRequest.parse, GrammarCheckRequest.parse):
        body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", name: "x"}
        with pytest.raises(InvalidParameter, match=f"is not known; did you mean '{meant}") as refused:
            read(body)
        assert refused.value.param == name[:80] and len(refused.value.message) < 200


def test_other_fields_are_no_typos() -> None:
    names = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    names |= {
        *ChatRequest.unsupported,
        *CompletionRequest.unsupported,
        "format",
        "options",
        "reasoning",
        "thinking",
        "input",
    }
    refuse_misspelt(dict.fromkeys(names, 1), names)
    refuse_misspelt({"guided_jsn": None}, {"guided_jsn"})  # asks for nothing
    assert constraint(tools=None, unheard_of=1) is None
