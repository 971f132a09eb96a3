"""What the engine gets for a constraint, in which order, and what is refused with which words. No backend library is loaded."""

import json
import subprocess
import sys
from typing import Any

import pytest

from trunkline.constraint import Constraint, Tag, Tags
from trunkline.errors import RequestError
from trunkline.grammar.interface import GrammarRefused
from trunkline.grammar.prepare import Prepared, prepare
from trunkline.grammar.prepared_cache import PreparedCache
from trunkline.grammar.schema import meta

RISKY = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,30000}$"}}}
OBJECT = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "additionalProperties": False,
}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def refused(**fields: Any) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as caught:
        prepare(Constraint(**fields))
    return caught.value


def backends_of(prepared: Prepared) -> list[str]:
    return [source.backend for source in prepared.grammar.sources]


def tag(name: str, schema: Any, index: int = 0) -> Tag:
    return Tag(
        begin=f'<t>{{"name": "{name}", "arguments": ',
        json_schema=json.dumps(schema),
        end="}</t>",
        where=f"tools[{index}].function.parameters",
        name=name,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json_schema": OBJECT}, ["llguidance"]),
        ({"json_schema": RISKY}, ["llguidance", "xgrammar"]),
        ({"json_object": True}, ["llguidance"]),
        ({"regex": "[0-9]{3}"}, ["outlines", "llguidance"]),
        ({"regex": "[^x]{1,500}"}, ["llguidance", "xgrammar"]),  # too many wide states for tables
        ({"choice": ("yes", "no")}, ["outlines", "llguidance"]),
        ({"ebnf": 'root ::= "a"'}, ["xgrammar", "llguidance"]),
        ({"lark": 'start: "a"'}, ["llguidance"]),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}}, ["xgrammar"]),
        ({"tags": Tags(tags=(tag("f", OBJECT),), forced=True)}, ["llguidance"]),
        ({"tags": Tags(tags=(tag("f", RISKY),), forced=True)}, ["llguidance", "xgrammar"]),
    ],
)
def test_auto_asks_the_backends_of_a_kind_in_their_order(fields: dict[str, Any], expected: list[str]) -> None:
    prepared = prepare(Constraint(**fields))
    assert backends_of(prepared) == expected
    assert prepared.is_exact


def test_auto_leaves_out_the_backends_that_cannot() -> None:
    schema = {"type": "array", "items": {"type": ["integer", "string"]}, "contains": {"type": "string"}}
    assert backends_of(prepare(Constraint(json_schema=schema))) == ["llguidance"]
    assert refused(json_schema=schema, backend="xgrammar").findings[0].keyword == "contains"


def test_two_constraints_under_auto_latch_no_backend() -> None:
    for _ in range(2):
        assert backends_of(prepare(Constraint(json_schema=OBJECT)))[0] == "llguidance"
        assert backends_of(prepare(Constraint(regex="[0-9]{3}")))[0] == "outlines"
        assert backends_of(prepare(Constraint(ebnf='root ::= "a"')))[0] == "xgrammar"


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
def test_an_explicit_backend_is_the_only_one(backend: str) -> None:
    assert backends_of(prepare(Constraint(json_schema=OBJECT, backend=backend))) == [backend]


def test_an_explicit_backend_that_cannot_refuses_and_says_why() -> None:
    error = refused(json_schema={"type": "array", "contains": {"type": "string"}}, backend="outlines")
    assert "by backend 'outlines'" in error.message and '(backend="auto") may find another' in error.message
    assert "only llguidance" in refused(lark='start: "a"', backend="xgrammar").message
    assert refused(json_object=True, backend="outlines").code == "unsupported_grammar"


def test_all_backends_can_be_asked() -> None:
    verdicts = prepare(Constraint(json_schema={"type": "object"}), all_backends=True).backends
    assert verdicts["llguidance"] is None and verdicts["xgrammar"] is None
    assert verdicts["outlines"] is not None and "nested" in verdicts["outlines"].reason


def test_what_cannot_be_enforced_is_refused_in_openais_words() -> None:
    error = refused(json_schema=UNIQUE, where="response_format", name="answer")
    assert error.message.startswith(
        "Invalid schema for response_format 'answer': In context=('properties', 'a'), 'uniqueItems' is not permitted."
    )
    assert "/properties/a" in error.message and "--grammar-unsupported validate" in error.message
    assert (error.status, error.type, error.code, error.param) == (
        400,
        "invalid_request_error",
        "unsupported_grammar",
        "response_format",
    )
    assert isinstance(error, RequestError)


def test_a_wrong_schema_is_refused_under_every_policy() -> None:
    for policy in ("error", "validate"):
        error = refused(json_schema={"type": "strng"}, unsupported=policy, where="response_format", name="x")
        assert "In context=(), 'type' is not valid" in error.message
        assert error.code is None
    assert "not valid" in refused(json_schema='{"type": ').message


def test_a_tools_schema_is_named_by_its_function() -> None:
    tags = Tags(tags=(tag("f", OBJECT, 0), tag("g", UNIQUE, 1)), forced=True)
    error = refused(tags=tags)
    assert error.message.startswith("Invalid schema for function 'g': In context=('properties', 'a'), 'uniqueItems'")
    assert error.param == "tools[1].function.parameters"
    wrong = refused(tags=Tags(tags=(tag("f", {"type": 1}),), forced=True))
    assert (wrong.param, wrong.code) == ("tools[0].function.parameters", "invalid_function_parameters")


def test_two_tools_may_use_the_same_name_for_different_definitions() -> None:
    schemas = [{"$ref": "#/$defs/X", "$defs": {"X": {"type": kind}}} for kind in ("object", ["object", "null"])]
    tags = Tags(tags=tuple(tag(f"f{index}", schema, index) for index, schema in enumerate(schemas)), forced=True)
    assert [json.dumps(schema) for _, schema in prepare(Constraint(tags=tags)).checks] == list(map(json.dumps, schemas))


def test_validate_leaves_out_what_cannot_be_enforced_and_says_so() -> None:
    prepared = prepare(Constraint(json_schema=UNIQUE), unsupported="validate")
    assert not prepared.is_exact
    assert [(finding.pointer, finding.keyword) for finding in prepared.findings] == [("/properties/a", "uniqueItems")]
    assert prepared.checks == (("constraint", UNIQUE),)
    assert prepared.backends["llguidance"] == prepared.findings[0]


def test_the_request_says_more_than_the_server_and_strict_more_than_both() -> None:
    assert prepare(Constraint(json_schema=UNIQUE, unsupported="validate"), unsupported="error").findings
    with pytest.raises(GrammarRefused):
        prepare(Constraint(json_schema=UNIQUE, unsupported="error"), unsupported="validate")
    with pytest.raises(GrammarRefused, match="strict to false"):
        prepare(Constraint(json_schema=UNIQUE, unsupported="validate", strict=True))


def test_validate_keeps_what_can_be_enforced_beside_it() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}, "minItems": 2}
    prepared = prepare(Constraint(json_schema=schema, backend="xgrammar"), unsupported="validate")
    exact = prepare(
        Constraint(json_schema={key: value for key, value in schema.items() if key != "contains"}, backend="xgrammar")
    )
    assert [finding.keyword for finding in prepared.findings] == ["contains"]
    assert prepared.grammar.sources == exact.grammar.sources


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_validate_leaves_arguments_an_object_at_least(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.grammar.prepare.MAX_WIDENED", 1)
    hard = UNIQUE | {"type": ["object", "array"], "uniqueItems": True}
    anything = prepare(Constraint(json_schema=hard, backend=backend), unsupported="validate")
    assert anything.grammar == prepare(Constraint(json_schema=True, backend=backend)).grammar
    arguments = Constraint(tags=Tags(tags=(tag("f", hard),), forced=True), backend=backend)
    found = prepare(arguments, unsupported="validate")
    assert found.findings
    objects = Constraint(tags=Tags(tags=(tag("f", {"type": "object"}),), forced=True), backend=backend)
    assert found.grammar == prepare(objects).grammar


def test_an_exact_grammar_has_no_findings_under_validate_either() -> None:
    assert prepare(Constraint(json_schema=OBJECT), unsupported="validate").is_exact


def test_the_callers_schema_is_not_changed() -> None:
    schema = {"definitions": {"X": {"type": "integer"}}, "items": [{"$ref": "#/definitions/X"}], "title": "T"}
    before = json.dumps(schema)
    prepared = prepare(Constraint(json_schema=schema))
    assert json.dumps(schema) == before
    assert json.dumps(prepared.checks[0][1]) == before


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"regex": "(a"}, "this regex is wrong"),
        ({"regex": r"(a)\1"}, "this regex cannot be followed"),
        ({"choice": ("a", "\ud800")}, "half of a surrogate pair"),
        ({"choice": tuple(map(str, range(50_001)))}, "at most 50000"),
        ({"ebnf": "x" * 2**20 + "x"}, "at most 1048576"),
        ({"structural_tag": {"type": "structural_tag"}}, "'format' is missing"),
    ],
)
def test_what_no_backend_should_be_given(fields: dict[str, Any], part: str) -> None:
    error = refused(**fields, where="structured_outputs")
    assert part in error.message and "'structured_outputs'" in error.message
    assert len(error.message) < 1200


def test_options_reach_the_engine() -> None:
    constraint = Constraint(json_schema=OBJECT, close_on_length=True, after="</think>", where="here")
    grammar = prepare(constraint).grammar
    assert (grammar.close_on_length, grammar.after, grammar.where) == (True, "</think>", "here")
    compact = prepare(Constraint(json_schema=OBJECT, compact=True)).grammar
    assert compact.sources != grammar.sources
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": OBJECT}}
    loose, tight = (prepare(Constraint(structural_tag=tag, compact=flag)).grammar for flag in (False, True))
    assert loose.sources != tight.sources
    in_any_order = prepare(Constraint(json_schema=OBJECT, key_order="any")).grammar
    assert in_any_order.sources != grammar.sources
    assert [source.backend for source in in_any_order.sources] == ["llguidance"]


TAG_OF_TEXT = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"json_schema": OBJECT, "backend": "xgrammar"}, "'auto' or 'llguidance'"),
        ({"json_schema": OBJECT, "backend": "outlines", "unsupported": "validate"}, "'auto' or 'llguidance'"),
        ({"tags": Tags(tags=(tag("f", OBJECT),), forced=True), "backend": "xgrammar"}, "'auto' or 'llguidance'"),
        ({"structural_tag": TAG_OF_TEXT}, "Leave it out."),
    ],
)
def test_keys_in_any_order_are_refused_where_they_cannot_be(fields: dict[str, Any], advice: str) -> None:
    error = refused(**fields, key_order="any")
    assert error.param == "key_order" and error.message.startswith("'key_order' is 'any', but ")
    assert advice in error.message


def test_the_order_of_keys_concerns_json_only() -> None:
    for fields in ({"regex": "a"}, {"choice": ("a", "b")}, {"ebnf": 'root ::= "a"'}):
        assert prepare(Constraint(**fields, key_order="any")).grammar == prepare(Constraint(**fields)).grammar


def test_backends_say_that_they_keep_the_order_of_keys() -> None:
    found = prepare(Constraint(json_schema=OBJECT, key_order="any"), all_backends=True).backends
    assert found["llguidance"] is None
    for backend in ("xgrammar", "outlines"):
        finding = found[backend]
        assert finding is not None and "key_order" in finding.reason


def test_keys_of_arguments_in_any_order() -> None:
    tags = Tags(tags=(tag("f", OBJECT),), forced=True)
    one, other = (prepare(Constraint(tags=tags, key_order=order)).grammar for order in ("schema", "any"))
    assert one.sources[0].text != other.sources[0].text


def test_no_backend_library_is_loaded() -> None:
    program = (
        "import sys\nfrom trunkline.constraint import Constraint\nfrom trunkline.grammar.prepare import prepare\n"
        "prepare(Constraint(json_schema={'type': 'object'}), all_backends=True)\n"
        "print([m for m in ('torch', 'llguidance', 'xgrammar', 'outlines_core', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- The cache.


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Schemas that were really read."""
    read: list[Any] = []
    check = meta.check

    def recording(text: Any) -> Any:
        read.append(text)
        return check(text)

    monkeypatch.setattr(meta, "check", recording)
    return read


def test_the_order_of_properties_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    cache = PreparedCache()
    turned = OBJECT | {"properties": dict(reversed(OBJECT["properties"].items()))}  # type: ignore[attr-defined]
    first, second = (cache.prepare(Constraint(json_schema=schema)) for schema in (OBJECT, turned))
    assert first.grammar != second.grammar
    assert cache.prepare(Constraint(json_schema=OBJECT)) is first
    assert len(read) == 2 and cache.num_hits == 1
    other = cache.prepare(Constraint(json_schema=OBJECT, key_order="any"))
    assert other.grammar != first.grammar
    assert len(read) == 2 and cache.num_hits == 1, "the schema itself is known"


def test_policies_do_not_share_an_entry() -> None:
    cache = PreparedCache()
    assert cache.prepare(Constraint(json_schema=UNIQUE), unsupported="validate").findings
    with pytest.raises(GrammarRefused):
        cache.prepare(Constraint(json_schema=UNIQUE), unsupported="error")


def test_a_refusal_is_remembered_for_a_while() -> None:
    now = 0.0
    cache = PreparedCache(clock=lambda: now)
    errors = []
    for now in (0.0, 59.0, 61.0):  # noqa: B007  the clock reads it
        with pytest.raises(GrammarRefused) as caught:
            cache.prepare(Constraint(json_schema=UNIQUE))
        errors.append(caught.value)
    assert (cache.num_hits, cache.num_misses) == (1, 2)
    assert errors[0] is not errors[1]
    assert (errors[0].message, errors[0].param, errors[0].code) == (errors[1].message, errors[1].param, errors[1].code)


def test_the_cache_is_bounded_in_number_and_in_bytes() -> None:
    cache = PreparedCache(max_entries=3)
    for number in range(5):
        cache.prepare(Constraint(json_schema={"const": number}))
    assert len(cache) == 3
    held = cache.num_bytes
    small = PreparedCache(max_bytes=held)
    for number in range(50):
        small.prepare(Constraint(json_schema={"const": number}))
        assert small.num_bytes <= held
    assert 0 < len(small) < 5
    small.prepare(Constraint(json_schema={"enum": ["x" * held]}))  # larger than all of it: not kept
    assert len(small) > 0


def test_the_least_recently_used_goes_first() -> None:
    cache = PreparedCache(max_entries=2)
    first, second, third = (Constraint(json_schema={"const": number}) for number in range(3))
    kept = cache.prepare(first)
    cache.prepare(second)
    assert cache.prepare(first) is kept
    cache.prepare(third)
    assert cache.prepare(first) is kept


def test_a_schema_of_patterns_that_are_hard_to_tell_apart_is_refused_before_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patterns = {f"a.{{{length}}}b": {"minLength": length} for length in range(12)}
    monkeypatch.setattr("trunkline.grammar.prepare.MAX_WORK", 100_000)
    error = refused(json_schema={"type": "object", "patternProperties": patterns})
    assert "takes too much work" in error.message and "'patternProperties' is not permitted" in error.message
    prepare(Constraint(json_schema={"type": "object", "patternProperties": {"^a": {}, "b$": {"minLength": 1}}}))


def test_the_cache_says_what_it_knows() -> None:
    now = 0.0
    cache = PreparedCache(clock=lambda: now, refused_seconds=60.0)
    good, bad = Constraint(json_schema=OBJECT), Constraint(json_schema={"type": "strng"})
    assert not cache.is_known(good)
    cache.prepare(good)
    with pytest.raises(GrammarRefused):
        cache.prepare(bad)
    assert cache.is_known(good) and cache.is_known(bad) and not cache.is_known(good, unsupported="validate")
    now = 61.0
    assert cache.is_known(good) and not cache.is_known(bad)


@pytest.mark.parametrize("schema", [{"type": "string"}, {"const": 5}, {"enum": [[], None]}])
def test_arguments_that_can_be_no_object_are_refused(schema: Any) -> None:
    parameters = {"$ref": "#/$defs/it", "$defs": {"it": schema}}
    error = refused(tags=Tags(tags=(tag("f", parameters),), forced=True))
    assert "arguments of a function are an object, and it allows none" in error.message
    assert error.code == "invalid_function_parameters"


def test_arguments_are_objects_though_the_schema_allows_more() -> None:
    def text_of(schema: Any) -> str:
        tags = Tags(tags=(tag("f", {"$ref": "#/$defs/it", "$defs": {"it": schema}}),), forced=True)
        return prepare(Constraint(tags=tags)).grammar.sources[0].text

    assert "secret" not in text_of({"enum": ["secret", {"a": 1}]}) and "secret" in text_of({"const": {"a": "secret"}})


def test_a_constraint_has_so_much_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"oneOf": [{"required": [f"p{index}"]} for index in range(60)], "type": "object"}
    monkeypatch.setattr("trunkline.grammar.prepare.MAX_SECONDS", -1.0)
    assert "takes too much work to combine" in refused(json_schema=schema).message
    prepare(Constraint(json_schema=OBJECT))


def test_a_long_regex_is_weighed_before_long() -> None:
    """What is copied at each state counts: a table for it would be too large anyway."""
    assert backends_of(prepare(Constraint(regex="(ab|cd)" * 2000))) == ["llguidance", "xgrammar"]
