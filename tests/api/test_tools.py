"""Tools of a request: what is refused, what must be written, who reads it, and the prompt of models that know none."""

import json
from typing import Any

import pytest

from tests.tiny import CHAT_TEMPLATE
from trunkline.api.dialect import Dialect, check_parsers
from trunkline.api.template import ChatTemplate
from trunkline.api.tool_parsers import choose_dialect, dialect_names
from trunkline.api.tool_parsers.hermes import HermesParser
from trunkline.api.tool_parsers.json_calls import GenericParser
from trunkline.api.tool_parsers.smollm import SmolLMParser
from trunkline.api.tools import MAX_TOOLS, ToolUse, read_tools
from trunkline.constraint import Constraint, Tag
from trunkline.errors import ConfigError, InvalidParameter
from trunkline.grammar.interface import GrammarRefused
from trunkline.models.tokenizer import Tokenizer

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PLACE, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def use_of(*tools: dict[str, Any], choice: Any = None, parallel: bool | None = None) -> ToolUse:
    use = read_tools(tools or [tool()], choice, parallel)
    assert use is not None
    return use


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "auto", "tool_choice"),
        ([], "required", "tool_choice"),
        ([tool()], "any", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], named("rain"), "tool_choice.function.name"),
        ([tool()], allowed("none", "weather"), "tool_choice"),
        ([tool()], allowed("auto", "rain"), "tool_choice.allowed_tools.tools[0].function.name"),
        ([tool()], allowed("auto"), "tool_choice.allowed_tools.tools"),
        (["weather"], None, "tools[0]"),
        ([tool(), {"type": "custom", "custom": {"name": "x"}}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a.b")], None, "tools[0].function.name"),
        ([tool("a" * 65)], None, "tools[0].function.name"),
        ([tool("a\n")], None, "tools[0].function.name"),
        ([tool(), tool("rain"), tool()], None, "tools[2].function.name"),
        ([tool(description=1)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], None, "tools[0].function.parameters.type"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], None, "tools"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_tools(tools, choice, None)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "choice"), [(None, None), ([], None), ([], "none"), (None, "none"), ([tool()], "none")]
)
def test_nothing_may_be_called(tools: Any, choice: Any) -> None:
    assert read_tools(tools, choice, None) is None


# ── what must be written ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("choice", "parallel", "mode", "at_most", "names"),
    [
        (None, None, "auto", None, ["weather", "rain"]),
        ("auto", False, "auto", 1, ["weather", "rain"]),
        ("required", None, "required", None, ["weather", "rain"]),
        ("required", False, "required", 1, ["weather", "rain"]),
        (named("rain"), True, "named", 1, ["rain"]),
        (allowed("required", "rain", "weather"), True, "required", None, ["weather", "rain"]),
        (allowed("auto", "rain"), False, "auto", 1, ["rain"]),
    ],
)
def test_choices(choice: Any, parallel: bool | None, mode: str, at_most: int | None, names: list[str]) -> None:
    use = use_of(tool(), tool("rain"), choice=choice, parallel=parallel)
    assert (use.mode, use.at_most, [each.name for each in use.tools]) == (mode, at_most, names)


def test_schemas_that_tags_enforce() -> None:
    """Strict tools always; others only if a call must be made. Without parameters there is nothing to pass; those that are sent
    stay as open as they are."""
    empty = {"type": "object", "properties": {}}
    tools = [
        tool(),
        tool("strict", strict=True),
        tool("bare", parameters=None),
        tool("loose", parameters={}),
        tool("empty", parameters=empty),
    ]

    def schemas(choice: str) -> dict[str, Any]:
        tags = use_of(*tools, choice=choice).tags(HermesParser.form)
        return {tag.name: json.loads(tag.json_schema) for tag in tags.tags}

    free = {"type": "object"}
    bare = {**empty, "additionalProperties": False}
    assert schemas("auto") == {"weather": free, "strict": PLACE, "bare": bare, "loose": free, "empty": free}
    assert schemas("required") == {"weather": PLACE, "strict": PLACE, "bare": bare, "loose": free, "empty": empty}
    absent = read_tools([{"type": "function", "function": {"name": "now"}}], "required", None)
    assert absent is not None
    assert absent.tools[0].parameters == bare


def test_tags_are_what_parsers_read() -> None:
    tags = use_of(tool(strict=True), choice="required").tags(SmolLMParser.form)
    (tag,) = tags.tags
    assert tag == Tag(
        begin='{"name": "weather", "arguments": ',
        json_schema=json.dumps(PLACE),
        end="}",
        where="tools[0].function.parameters",
        name="weather",
        strict=True,
    )
    assert (tags.forced, tags.opening, tags.separator, tags.closing) == (True, "<tool_call>[", ", ", "]</tool_call>")


# ── which dialect ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wanted", "template", "knows_tools", "dialect"),
    [
        ("auto", "{{ messages }}", False, SmolLMParser),
        ("auto", "{% if tools %}<tool_call>{% endif %}", True, HermesParser),
        ("hermes", "", False, HermesParser),
        ("json", "", True, GenericParser),
    ],
)
def test_dialect(wanted: str, template: str, knows_tools: bool, dialect: Any) -> None:
    assert choose_dialect(wanted, template, has_tools_branch=knows_tools).dialect is dialect


def test_unknown_parsers_are_a_sentence(tokenizer: Tokenizer) -> None:
    """Said by a server before it loads anything, too."""
    check_parsers("auto", "none")
    for names in (("gpt", "none"), ("auto", "gpt")):
        with pytest.raises(ConfigError):
            check_parsers(*names)
    with pytest.raises(ConfigError, match=f"allowed is one of auto, {dialect_names()[0]}"):
        Dialect.of(None, tokenizer, tool_call_parser="gpt")
    with pytest.raises(ConfigError, match="allowed is one of none, "):
        Dialect.of(None, tokenizer, reasoning_parser="gpt")


def test_the_log_says_who_reads(tokenizer: Tokenizer) -> None:
    assert "Thoughts" not in dialect_of(tokenizer).sentence
    sentence = dialect_of(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3").sentence
    assert "as those of hermes: --tool-call-parser says so." in sentence
    assert sentence.endswith(" Thoughts are read as those of qwen3: --reasoning-parser says so.")


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def dialect_of(tokenizer: Tokenizer, template: str = CHAT_TEMPLATE, **parsers: str) -> Dialect:
    return Dialect.of(ChatTemplate(template, special_tokens={}), tokenizer, **parsers)


OPTIONS = {"backend": "auto", "unsupported": "error", "close_on_length": True, "compact": False}
RESPONSE = Constraint(json_schema={"type": "object"}, where="response_format", name="r", strict=True)


def test_plan_of_free_text(tokenizer: Tokenizer) -> None:
    plan = dialect_of(tokenizer).plan(None, response=None, prompt="", options=OPTIONS)
    assert plan.constraint is None
    assert plan.reader().is_plain
    kept = dialect_of(tokenizer).plan(None, response=RESPONSE, prompt="", options=OPTIONS)
    assert kept.constraint == RESPONSE


def test_plan_of_auto_waits_for_the_trigger(tokenizer: Tokenizer) -> None:
    constraint = dialect_of(tokenizer).plan(use_of(), response=None, prompt="", options=OPTIONS).constraint
    assert constraint is not None
    assert constraint.tags is not None
    assert (constraint.tags.forced, constraint.tags.trigger) == (False, "<tool_call>")
    assert constraint.close_on_length


def test_plan_of_auto_with_response_format_is_either(tokenizer: Tokenizer) -> None:
    constraint = dialect_of(tokenizer).plan(use_of(), response=RESPONSE, prompt="", options=OPTIONS).constraint
    assert constraint is not None
    assert constraint.tags is not None
    assert constraint.tags.forced
    assert constraint.tags.instead == Tag(
        begin="", json_schema='{"type": "object"}', end="", where="response_format", name="r", strict=True
    )
    with pytest.raises(InvalidParameter, match="unless it is JSON"):
        dialect_of(tokenizer).plan(use_of(), response=Constraint(regex="a"), prompt="", options=OPTIONS)


def test_plan_of_forced_calls_ignores_response_format(tokenizer: Tokenizer) -> None:
    use = use_of(choice="required")
    constraint = dialect_of(tokenizer).plan(use, response=RESPONSE, prompt="", options=OPTIONS).constraint
    assert constraint is not None
    assert constraint.tags == use.tags(SmolLMParser.form)


def test_strict_tools_of_a_dialect_that_no_grammar_writes_are_refused_unless_they_must_be_called(
    tokenizer: Tokenizer,
) -> None:
    class Foreign(HermesParser):
        form = None  # type: ignore[assignment]

    dialect = dialect_of(tokenizer)._replace(tools=Foreign)
    assert dialect.plan(use_of(), response=None, prompt="", options=OPTIONS).constraint is None
    with pytest.raises(GrammarRefused, match="is strict") as caught:
        dialect.plan(use_of(tool(strict=True)), response=None, prompt="", options=OPTIONS)
    assert caught.value.param == "tools[0].function.parameters"
    forced = dialect.plan(use_of(tool(strict=True), choice="required"), response=None, prompt="", options=OPTIONS)
    assert forced.constraint is not None


def test_dialects_that_no_grammar_writes_are_forced_as_generic_json(tokenizer: Tokenizer) -> None:
    class Foreign(HermesParser):
        form = None  # type: ignore[assignment]

    dialect = dialect_of(tokenizer)._replace(tools=Foreign)
    assert dialect.plan(use_of(), response=None, prompt="", options=OPTIONS).tools is Foreign
    plan = dialect.plan(use_of(choice="required"), response=None, prompt="", options=OPTIONS)
    assert plan.tools is GenericParser
    assert plan.constraint is not None
    assert plan.constraint.tags is not None
    assert plan.constraint.tags.opening == "["


def test_thoughts_come_before_what_a_text_must_follow(tokenizer: Tokenizer) -> None:
    dialect = dialect_of(tokenizer, reasoning_parser="qwen3")
    thinking = dialect.plan(None, response=RESPONSE, prompt="assistant\n", options=OPTIONS)
    assert thinking.constraint is not None
    assert thinking.constraint.after == "</think>"
    told_not_to = dialect.plan(None, response=RESPONSE, prompt="<think>\n\n</think>\n\n", options=OPTIONS)
    assert told_not_to.constraint == RESPONSE
    assert told_not_to.reader().is_plain


# ── reading answers ─────────────────────────────────────────────────────────────────────────────────────────────────────

CALLS = '<tool_call>[{"name": "weather", "arguments": {"place": "Ulm"}}, {"name": "rain"}]</tool_call>'


def read(tokenizer: Tokenizer, text: str, use: ToolUse | None, **parsers: str) -> tuple[dict[str, Any], str]:
    """Message and finish reason; asserts that the deltas of a stream add up to the message, wherever it is cut."""
    plan = dialect_of(tokenizer, **parsers).plan(use, response=None, prompt="", options=OPTIONS)
    whole = plan.reader()
    whole.push(text)
    whole.finish("stop")
    message = whole.message()
    for pieces in ([text], list(text), [text[:9], text[9:40], text[40:]]):
        reader = plan.reader()
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish("stop")
        assert without_ids(added_up(deltas)) == without_ids(message)
    return message, whole.finish_reason("stop")


def added_up(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for delta in deltas:
        ((key, value),) = delta.items()
        if key != "tool_calls":
            message[key] = (message.get(key) or "") + value
            continue
        (call,) = value
        if "id" in call:
            assert call["index"] == len(message.setdefault("tool_calls", []))
            assert call["function"]["arguments"] == ""
            message["tool_calls"].append({**call, "function": dict(call["function"])})
        else:
            assert call.keys() == {"index", "function"}
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for call in message.get("tool_calls", []):
        del call["index"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": [{**call, "id": ""} for call in calls]}


def test_calls_and_text(tokenizer: Tokenizer) -> None:
    message, reason = read(tokenizer, f"I look it up.\n{CALLS}", use_of(tool(), tool("rain")))
    assert reason == "tool_calls"
    assert message["content"] == "I look it up."
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "weather", "arguments": '{"place": "Ulm"}'}
    assert second["function"] == {"name": "rain", "arguments": "{}"}


def test_text_alone(tokenizer: Tokenizer) -> None:
    message, reason = read(tokenizer, "It rains.", use_of())
    assert message == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert reason == "stop"


def test_named_call_ends_with_stop_and_is_the_only_one(tokenizer: Tokenizer) -> None:
    message, reason = read(tokenizer, CALLS, use_of(tool(), tool("rain"), choice=named("weather")))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert message["content"] is None
    assert reason == "stop"


def test_calls_that_were_cut_off(tokenizer: Tokenizer) -> None:
    use = use_of(choice="required")
    message, reason = read(tokenizer, CALLS[:50], use)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"pla'
    assert reason == "stop"
    message, _ = read(tokenizer, CALLS[:30], use)
    assert message == {"role": "assistant", "content": None, "refusal": None}
    plan = dialect_of(tokenizer).plan(use, response=None, prompt="", options=OPTIONS)
    assert plan.reader().finish_reason("length") == "length"


@pytest.mark.parametrize("end", ['"', '", ', '", "argum', '", "arguments":', '", "arguments": '])
@pytest.mark.parametrize("choice", ["auto", "required", named("weather")])
def test_a_call_that_was_cut_off_behind_its_name_has_empty_arguments(
    tokenizer: Tokenizer, end: str, choice: Any
) -> None:
    plan = dialect_of(tokenizer).plan(use_of(choice=choice), response=None, prompt="", options=OPTIONS)
    reader = plan.reader()
    deltas = reader.push('<tool_call>[{"name": "weather' + end) + reader.finish("length")
    message = reader.message()
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "weather", "arguments": ""}]
    assert message["content"] is None
    assert added_up(deltas) == message
    assert reader.finish_reason("length") == "length"


@pytest.mark.parametrize("length", range(1, len(CALLS)))
def test_of_a_text_that_was_cut_off_no_marks_are_shown(tokenizer: Tokenizer, length: int) -> None:
    plan = dialect_of(tokenizer).plan(use_of(tool(), tool("rain")), response=None, prompt="", options=OPTIONS)
    reader = plan.reader()
    reader.push(CALLS[:length])
    reader.finish("length")
    assert reader.content == ("" if length >= len("<tool_call>") else CALLS[:length])


def test_parallel_calls_can_be_switched_off_where_no_grammar_is(tokenizer: Tokenizer) -> None:
    message, _ = read(tokenizer, CALLS, use_of(tool(), tool("rain"), parallel=False))
    assert len(message["tool_calls"]) == 1


def test_thoughts_then_calls(tokenizer: Tokenizer) -> None:
    text = f"<think>\nIs it <tool_call>? \n</think>\n\n{CALLS}"
    message, reason = read(tokenizer, text, use_of(), reasoning_parser="qwen3")
    assert message["reasoning_content"] == "Is it <tool_call>?"
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("a\n</think>\n\nb\n", "a", "b\n"),
        ("<think>a </thin", "a </thin", None),
        ("<think>\n\n</think>\n\nb", None, "b"),
        ("<thi", "<thi", None),
        ("", None, None),
    ],
)
def test_thoughts(tokenizer: Tokenizer, text: str, thoughts: str | None, content: str | None) -> None:
    message, _ = read(tokenizer, text, None, reasoning_parser="deepseek_r1")
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, content)


# ── the prompt of models that know no tools ─────────────────────────────────────────────────────────────────────────────

USER = {"role": "user", "content": "Rain?"}


def render(messages: list[dict[str, Any]], template: str = CHAT_TEMPLATE, **options: Any) -> str:
    return ChatTemplate(template, special_tokens={}).render(messages, **options)


def test_tools_stand_first_and_in_their_order() -> None:
    system = {"role": "system", "content": "Be short."}
    prompt = render([system, USER], tools=[tool(strict=True), tool("rain")])
    shown = [{"name": name, "parameters": PLACE} for name in ("weather", "rain")]
    assert f"<tools>{json.dumps(shown)}</tools>" in prompt
    assert prompt.startswith("<|im_start|>system\nYou can call functions.")
    assert prompt.index("</tools>") < prompt.index("Be short.<|im_end|>")
    assert render([USER], tools=[tool(), tool("rain")]).split("</tools>")[0] == prompt.split("</tools>")[0]


def test_a_template_without_a_system_message_tells_tools_in_the_first_user_message() -> None:
    for refusal in ("{{ raise_exception('no system message') }}", ""):
        template = (
            "{% for m in messages %}{% if m.role == 'system' %}"
            + refusal
            + "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
        )
        prompt = render([USER, {"role": "user", "content": "Now?"}], template, tools=[tool()])
        assert prompt.startswith("You can call functions.")
        assert prompt.endswith("\n\nRain?|Now?|")


def test_a_template_with_tools_gets_them_and_the_calls() -> None:
    template = (
        "{{ tools[0].function.name }}{% for m in messages %}{{ m.tool_calls[0].function.arguments.place }}{% endfor %}"
    )
    assert render([turn_of_calls()], template, tools=[tool()]) == "weatherUlm"


def turn_of_calls() -> dict[str, Any]:
    calls = [("weather", '{"place":"Ulm" }'), ("rain", "{}")]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }


def test_calls_in_the_history_read_as_the_model_wrote_them() -> None:
    """To the letter, so that the cache has them."""
    results = [{"role": "tool", "tool_call_id": "call_weather", "content": "sun"}, {"role": "tool", "content": "no"}]
    prompt = render([USER, turn_of_calls(), *results])
    written = (
        '<tool_call>[{"name": "weather", "arguments": {"place":"Ulm" }}, {"name": "rain", "arguments": {}}]</tool_call>'
    )
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n" in prompt
    assert (
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nno\n</tool_response><|im_end|>"
        in prompt
    )


def test_what_is_no_call_is_a_sentence() -> None:
    with pytest.raises(InvalidParameter, match="tool_calls"):
        render([USER, {"role": "assistant", "content": "", "tool_calls": [{"function": "weather"}]}])
