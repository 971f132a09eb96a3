"""All dialects: the exact texts of models, random arguments written and read back, nonsense, and texts made to hurt."""

import json
import re
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.api.tool_parsers.readings import Call, Reading, read, read_in_all_splits, together
from tests.api.tool_parsers.writers import NOTATIONS
from tests.data import grammar_rows
from trunkline.api.tool_parsers import DIALECTS, choose_dialect, find_dialect
from trunkline.api.tool_parsers.base import CallStart, ToolNames
from trunkline.api.tools import read_tools

NAMES = [dialect.name for dialect in DIALECTS]
FORMATS = {  # rows of wire_formats.jsonl
    "hermes": "hermes",
    "smollm2": "smollm",
    "smollm3 python_tools": "smollm3_python",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "mistral (tokenizer <= v7)": "mistral",
    "mistral (tokenizer >= v11)": "mistral_v11",
    "deepseek v3 / r1": "deepseek_v3",
    "deepseek v3.1": "deepseek_v31",
    "deepseek v3.2": "deepseek_v32",
    "qwen3-coder": "qwen3_coder",
    "harmony": "openai",
    "kimi k2": "kimi_k2",
    "glm 4.x": "glm45",
    "functiongemma": "functiongemma",
    "gemma 4": "gemma4",
}
ONE = [("get_weather", {"city": "Paris"})]
TWO = [("f", {"a": 1}), ("g", {})]


def test_every_dialect_is_written_by_these_tests() -> None:
    assert set(NAMES) == set(NOTATIONS)
    assert set(NAMES) == {*FORMATS.values(), "json"}


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_every_split(name: str) -> None:
    write, dialect = NOTATIONS[name].write, find_dialect(name)
    for calls in (ONE, TWO):
        reading = read_in_all_splits(dialect, write(calls))
        assert reading == ("", [Call(function, json.dumps(arguments)) for function, arguments in calls])
    if name != "json":
        text = write(TWO)
        if name != "pythonic":
            assert read_in_all_splits(dialect, f"Let me see.\n\n{text}").content == "Let me see."
        reading = read_in_all_splits(dialect, f"{text}\n\nDone.")
        assert (reading.content.lstrip("\n"), len(reading.calls)) == ("Done.", 2)


def test_formats_of_the_data() -> None:
    """As they stand, to the letter; where a row says in words how several are written, two are put together so."""
    rows = grammar_rows("wire_formats")
    assert len(rows) == len(FORMATS)
    for row in rows:
        (dialect,) = [find_dialect(name) for start, name in FORMATS.items() if row["format"].startswith(start)]
        (call,) = read_in_all_splits(dialect, row["single"]).calls
        assert (call.name, json.loads(call.arguments), call.is_complete) == (
            "get_weather",
            {"city": "Paris"} | _unit(row),
            True,
        )
        several = row["parallel"]
        if several == "two <｜DSML｜invoke> blocks inside one function_calls":
            several = re.sub("(<｜DSML｜invoke .*</｜DSML｜invoke>)", r"\1\n\1", row["single"], flags=re.DOTALL)
        elif several == "several <|tool_call_begin|> blocks, the index after ':' counts up":
            several = re.sub(r"(<\|tool_call_begin.*call_end\|>)", r"\1\1", row["single"]).replace(":0", ":1", 1)
        elif several in ("repeat", "repeat the block"):
            several = f"{row['single']}\n{row['single']}"
        elif several == "one call per message":
            several = f"{row['single']}<|start|>assistant{row['single']}"
        if several is not None:
            reading = read_in_all_splits(dialect, several)
            assert [call.is_complete for call in reading.calls] == [True, True]
            assert reading.content == ""


def _unit(row: dict[str, Any]) -> dict[str, str]:
    return {"unit": "c"} if "unit" in row["single"] else {}


# ── random arguments ────────────────────────────────────────────────────────────────────────────────────────────────────

LOOK_ALIKES = [
    *sorted({marker for dialect in DIALECTS for marker in dialect.markers}),
    *("{test1,test2", "}", "{", "[", "]", "(", ")", ",", ":", '"', "'", '"""', "'''", "\\", "\\n", "\\u00e9", "\\x4"),
    *(
        "```",
        "\n```",
        "<function=",
        "<parameter=a>",
        "</parameter",
        "</function>",
        "</arg_valu",
        "<",
        ">",
        "=",
        "f(a=1)",
    ),
    *(
        "True",
        "null",
        "1",
        " ",
        "\n",
        "\r\n",
        "\t",
        "é",
        "🙂",
        "\x00",
        "\x1f",
        "\u2028",
        "call:f{a:1}",
        "</think>",
        "#",
        ";",
    ),
]
TEXTS = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(LOOK_ALIKES), max_size=6).map("".join))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
KEYS = st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True).filter(lambda key: key not in ("True", "None", "False"))


def values(keys: Any) -> Any:
    return st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )


def schema_of(value: Any) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


def names_of(calls: list[tuple[str, dict[str, Any]]]) -> ToolNames:
    return ToolNames(
        frozenset(name for name, _ in calls),
        parameters={
            name: {"type": "object", "properties": {key: schema_of(value) for key, value in arguments.items()}}
            for name, arguments in calls
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_random_arguments_are_read_back(name: str, data: Any) -> None:
    write, never = NOTATIONS[name]
    # Bare keys can't hold everything; those of JSON, of Python's dictionaries and between quotes can.
    keys = KEYS if name in ("functiongemma",) else KEYS | TEXTS
    arguments = st.dictionaries(KEYS, values(keys), max_size=3)
    calls = list(data.draw(st.dictionaries(st.sampled_from(["f", "get_b", "c-d"]), arguments, min_size=1)).items())
    inside = "".join(json.dumps(arguments, ensure_ascii=False) for _, arguments in calls)
    assume(not any(json.dumps(text, ensure_ascii=False)[1:-1] in inside for text in never))
    text = write(calls)
    whole = read(find_dialect(name), text, names=names_of(calls))
    assert [(call.name, json.loads(call.arguments), call.is_complete) for call in whole.calls] == [
        (function, arguments, True) for function, arguments in calls
    ]
    assert whole.content == ""
    at = data.draw(st.integers(0, len(text)))
    assert read(find_dialect(name), text[:at], text[at:], names=names_of(calls)) == whole
    assert read(find_dialect(name), *text, names=names_of(calls)) == whole


# ── what a value is, where only a schema says it ────────────────────────────────────────────────────────────────────────

TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "list": {"$ref": "#/$defs/list"},
        "unit": {"enum": ["1", "2"]},
        "one": {"const": 1},
    },
    "$defs": {"list": {"type": "array"}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("key", "text", "json_text"),
    [
        ("text", "5", '"5"'),
        ("text", "null", '"null"'),
        ("text", ' {"a": 1} ', '" {\\"a\\": 1} "'),
        ("unit", "1", '"1"'),
        ("one", "1", "1"),
        ("count", "5", "5"),
        ("count", "five", '"five"'),
        ("count", "NaN", '"NaN"'),
        ("flag", "True", "true"),
        ("flag", "false", "false"),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "5", '"5"'),
        ("either", "5", "5"),
        ("either", '"5"', '"\\"5\\""'),
        ("list", "[1, [2]]", "[1, [2]]"),
        ("list", "[1, ", '"[1, "'),
        ("list", "__import__('os')", "\"__import__('os')\""),
        ("unheard_of", "5", "5"),
        ("unheard_of", "plain", '"plain"'),
        ("unheard_of", "[" * 5000, '"' + "[" * 5000 + '"'),
    ],
)
def test_values_are_typed_by_the_schema(name: str, key: str, text: str, json_text: str) -> None:
    names = ToolNames(frozenset({"f"}), parameters={"f": TYPED})
    (call,) = read(find_dialect(name), NOTATIONS[name].write([("f", {key: text})]), names=names).calls
    assert call.arguments == f'{{"{key}": {json_text}}}'


def test_the_schemas_come_from_the_request() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": TYPED}}
    use = read_tools([tool], None, None)
    assert use is not None
    assert use.names.parameters == {"f": TYPED}


# ── nonsense ────────────────────────────────────────────────────────────────────────────────────────────────────────────

FRAGMENTS = ['{"name": "f", "arguments": {"a": 1}}', "f", "(", ")", "a=1", "{", "}", "[", "]", ",", ":", '"', "'", " ", "\n", "call:f{", "function", "<function=f>", "<parameter=a>", "</parameter>", "</function>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "x", "5", "é", "\\"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_text_reads_the_same_in_pieces_and_is_not_lost(name: str, data: Any) -> None:
    dialect = find_dialect(name)
    blocks = [mark for mark in ("<｜DSML｜function_calls>", "<code>", "<|python_start|>") if name in ("deepseek_v32", "smollm3_python", "pythonic")]  # fmt: skip
    text = data.draw(st.lists(st.sampled_from([*dialect.markers, *blocks, *FRAGMENTS]), max_size=10).map("".join))
    whole = read(dialect, text)
    assert read(dialect, *text) == whole
    at = data.draw(st.integers(0, len(text)))
    assert read(dialect, text[:at], text[at:]) == whole
    is_layout = name == "openai" or re.search(r"begin\|?｜?>\s*<[^>]*end|<tool_call>\s*\[\s*\]|\[\s*\]", text)
    if not whole.calls and not is_layout:
        assert whole.content == text


@pytest.mark.parametrize("name", NAMES)
def test_of_a_text_that_was_cut_off_no_marks_are_shown(name: str) -> None:
    dialect, text = find_dialect(name), NOTATIONS[name].write(TWO)
    for length in range(len(text)):
        parser = dialect()
        events = parser.push(text[:length]) + parser.finish(is_cut=True)
        content = "".join(getattr(event, "text", "") for event in events)
        has_begun = any(isinstance(event, CallStart) for event in events)
        assert content == "" if has_begun else text.startswith(content)
        assert len(content) < 28, "only the beginning of the first marker may be text"


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_ends_in_its_middle_is_handed_on_as_far_as_it_came(name: str) -> None:
    calls = [("f", {"a": "some text", "b": 7})]
    text = NOTATIONS[name].write(calls)
    at = text.index("some text") + 4
    for names in (ToolNames(), names_of(calls)):
        (call,) = read_in_all_splits(find_dialect(name), text[:at], names).calls
        assert call == Call("f", '{"a": "some', is_complete=False)


@pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS if dialect.form is not None])
def test_a_call_that_is_cut_off_behind_its_name_is_handed_on_without_arguments(name: str) -> None:
    dialect, names = find_dialect(name), ToolNames(frozenset({"f"}))
    assert dialect.form is not None
    for known in ("f", "other"):
        text = dialect.form.opening + dialect.form.begin.replace("{name}", known)
        parser = dialect(names)
        found = together(parser.push(text) + parser.finish(is_cut=True))
        assert found == Reading("", [Call("f", "", is_complete=False)] if known == "f" else [])
        assert not read(dialect, text, names=names).calls, "nothing was cut off: it is no call"


def test_a_name_that_may_go_on_is_no_call() -> None:
    parser = find_dialect("mistral_v11")(ToolNames(frozenset({"get"})))
    assert together(parser.push("[TOOL_CALLS]get") + parser.finish(is_cut=True)) == Reading("", [])


# ── what would take for ever elsewhere ──────────────────────────────────────────────────────────────────────────────────

HOSTILE = ["[", "{", "(", '{"a":', "[f(a=[", "[f(a='\\", "f(a={'", "<tool_call>", '<tool_call>{"arguments": "', "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", "<function=f>\n<parameter=a>", "<tool_call>f<arg_key>a</arg_key><arg_value>", "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\">", "<|tool_calls_section_begin|><|tool_call_begin|>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<|channel|>", "<|start|>assistant<|channel|>commentary", "<code>", "<code>f(a=", "<start_function_call>call:f{a:[", '<|tool_call>call:f{a:<|"', '{"name": ', "<|python_tag|>{", "a", "-", "{test1,test2"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lines_of_code_grow_with_the_text_and_no_faster(name: str) -> None:
    dialect = find_dialect(name)
    for piece in HOSTILE:
        short, long = (count_lines(dialect, piece * (length // len(piece))) for length in (1000, 2000))
        assert long < 2.5 * short + 200, piece


def count_lines(dialect: Any, text: str) -> int:
    """Lines of Python that run while the text is read, in pieces of 100 characters."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    parser = dialect()
    sys.settrace(trace)
    try:
        for at in range(0, len(text), 100):
            parser.push(text[at : at + 100])
        parser.finish()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_long_nonsense_is_read(name: str) -> None:
    for piece in HOSTILE:
        text = piece * (100_000 // len(piece))
        assert read(find_dialect(name), text) == read(find_dialect(name), *re.findall("(?s).{1,1000}", text))


@pytest.mark.parametrize(
    ("name", "begin"), [("pythonic", "[f(a="), ("smollm3_python", "<code>f(a="), ("gemma4", "<|tool_call>call:f{a:")]
)
def test_depth_is_bounded(name: str, begin: str) -> None:
    """What is too deep is no value: the call ends there, and the rest is text."""
    reading = read(find_dialect(name), begin + "[" * 20_000)
    (call,) = reading.calls
    assert not call.is_complete
    assert call.arguments.strip("[") == '{"a": '
    assert 0 < len(call.arguments) < 100
    assert len(call.arguments) + len(reading.content) > 20_000, "nothing is lost"


# ── ids, and what single dialects allow ─────────────────────────────────────────────────────────────────────────────────


def ids_of(name: str, text: str) -> list[str]:
    parser = find_dialect(name)()
    return [event.id for event in parser.push(text) + parser.finish() if isinstance(event, CallStart)]


def test_ids() -> None:
    for name in ("mistral", "mistral_v11"):
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", call_id) for call_id in ids_of(name, NOTATIONS[name].write(TWO)))
    own, again, wrong = ids_of(
        "mistral", "".join(f"[TOOL_CALLS]f[CALL_ID]{i}[ARGS]{{}}" for i in ("abc456789", "abc456789", "x"))
    )
    assert own == "abc456789"
    assert re.fullmatch("[a-zA-Z0-9]{9}", again)
    assert again != own
    assert re.fullmatch("[a-zA-Z0-9]{9}", wrong)
    assert ids_of("kimi_k2", NOTATIONS["kimi_k2"].write([("f", {}), ("f", {}), ("g", {})])) == [
        "functions.f:0",
        "functions.f:1",
        "functions.g:0",
    ]
    assert all(call_id.startswith("call_") for call_id in ids_of("gemma4", NOTATIONS["gemma4"].write(TWO)))


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # Llama
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3_json", '{"answer": [1]}', '{"answer": [1]}', []),
        ("llama3_json", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
        ("llama3_json", '{"name": "f", "parameters": {}}; and so on', "; and so on", [("f", "{}")]),
        # Python
        ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [("f", '{"a": 1}')]),
        ("pythonic", "I do: <|tool_call_start|>[f(a=1)]<|tool_call_end|>", "I do:", [("f", '{"a": 1}')]),
        ("pythonic", "<function_calls>f(a=1)\ng()</function_calls>", "", [("f", '{"a": 1}'), ("g", "{}")]),
        ("pythonic", "\n [ns.f( a = ( 1 , ), b={1: None, True: -0.5,}, )] ", "", [("ns.f", '{"a": [1], "b": {"1": null, "true": -0.5}}')]),
        ("pythonic", "[f(a=1_000, b=.5, c=5., d=+3, e=1e5, g=0x1F, h=007)]", "", [("f", '{"a": 1000, "b": 0.5, "c": 5.0, "d": 3, "e": 1e5, "g": "0x1F", "h": "007"}')]),
        ("pythonic", "[f(a='\\x41\\u00e9\\U0001F642\\101\\q\\ud83d', b='''it's\n''', c=\"\", d='')]", "", [("f", '{"a": "Aé🙂A\\\\q\\ud83d", "b": "it\'s\\n", "c": "", "d": ""}')]),
        ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
        ("pythonic", "[link](http://x)", "[link](http://x)", []),
        ("pythonic", "[f(__import__('os').system('x'))]", "[f(__import__", []),
        ("pythonic", "See [f(a=1)]", "See [f(a=1)]", []),
        ("smollm3_python", '<code>\nf("x", 2)\n</code>', "", [("f", '{"a": "x", "b": 2}')]),
        ("smollm3_python", "<code>\nf(None, b=2)\n</code>", "", [("f", '{"a": null, "b": 2}')]),
        ("smollm3_python", "<code>\nprint(1)\n</code>", "<code>\nprint(", []),
        # Mistral
        ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        # DeepSeek
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>", "", [("f", "{}")]),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>No.", "No.", []),
        ("deepseek_v32", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls>', "", [("f", "{}")]),
        ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter></｜DSML｜invoke>', "", [("f", '{"a": "1"}')]),
        # Qwen, GLM
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", "", [("f", '{"a": 1}')]),
        ("qwen3_coder", "<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>", []),
        ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x\n</arg_value></tool_call>", "", [("f", '{"a": "x\\n"}')]),
        # Kimi
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "", [("f", "{}")]),
        # Gemma
        ("gemma4", '<|tool_call>call:f{a:hello there,b:"x\\n",c:None,d:[],e:{},g:-1.5}<tool_call|>', "", [("f", '{"a": "hello there", "b": "x\\n", "c": null, "d": [], "e": {}, "g": -1.5}')]),
        ("functiongemma", "<start_function_call>call:f{ a : <escape>{x}, [y]<escape> , b:1 }<end_function_call>", "", [("f", '{"a": "{x}, [y]", "b": 1}')]),
        # Harmony
        ("openai", "<|channel|>final<|message|>Yes.<|return|>", "Yes.", []),
        ("openai", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", "I look.", [("f", "{}")]),
        ("openai", "<|channel|>commentary to=browser.search<|message|>{}", "<|channel|>commentary to=browser.search<|message|>{}", []),
    ],
)  # fmt: skip
def test_texts(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    names = ToolNames(parameters={"f": {"properties": {"a": {}, "b": {}}}} if name == "smollm3_python" else {})
    reading = read_in_all_splits(find_dialect(name), text, names)
    assert reading.calls == [Call(*call) for call in calls]
    assert reading.content == content or (not calls and reading.content == text)


# ── which dialect a template teaches: as those of the models write calls ────────────────────────────────────────────────

TEMPLATES = {
    "hermes": '<tool_call>\\n{"name": \' + call.name + \', "arguments": \'',
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "glm45": "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "deepseek_v3": "{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' }}",
    "deepseek_v31": "{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
    "deepseek_v32": "{{ '<｜DSML｜function_calls>' }}",
    "kimi_k2": "<|tool_calls_section_begin|>{{ call.id }}",
    "openai": "{{ '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "mistral_v11": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "functiongemma": "{{ '<start_function_call>call:' + name + '{' }}",
    "gemma4": "{{ '<|tool_call>call:' + name + '{' }}",
    "pythonic": "Put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_dialects_are_known_by_their_templates(name: str) -> None:
    choice = choose_dialect("auto", TEMPLATES[name], has_tools_branch=True)
    assert choice.dialect is find_dialect(name)
    assert "the chat template has" in choice.reason


def test_names_are_those_of_other_servers_too() -> None:
    taken = [name for dialect in DIALECTS for name in (dialect.name, *dialect.aliases)]
    assert len(taken) == len(set(taken))
    assert {"llama4_pythonic", "deepseekv3", "glm47", "gpt-oss", "qwen25", "qwen3_xml"} <= set(taken)
    newer = choose_dialect("mistral", TEMPLATES["mistral_v11"], has_tools_branch=True).dialect
    assert newer is find_dialect("mistral_v11")


@pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS if dialect.form is not None])
def test_what_a_grammar_writes_is_read(name: str) -> None:
    """And is told by its trigger, whatever is called first."""
    dialect = find_dialect(name)
    assert dialect.form is not None
    text = dialect.form.write([("f", '{"a": 1}'), ("get_b", "{}")])
    assert read_in_all_splits(dialect, text) == ("", [Call("f", '{"a": 1}'), Call("get_b", "{}")])
    assert dialect.form.trigger in dialect.form.opening + dialect.form.begin.partition("{name}")[0]
    assert dialect.form.closing or dialect.form.trigger in dialect.form.begin
