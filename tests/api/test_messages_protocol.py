"""Anthropic's bodies as chats: what becomes of messages, tools and marks, and how refusals name what was sent."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.api.cache_control import PinWish
from trunkline.api.messages_protocol import CountTokensRequest, MessagesRequest, renamed
from trunkline.api.protocol import ChatRequest
from trunkline.api.response_format import GrammarDefaults
from trunkline.errors import InvalidParameter, RequestError

HI: Any = {"role": "user", "content": "Hi"}
MARK = {"type": "ephemeral"}
TOOL: Any = {"name": "weather", "description": "Tomorrow's", "input_schema": {"type": "object", "properties": {}}}
USE: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Köln"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def parse(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    return MessagesRequest.parse({"max_tokens": 9, "messages": list(messages) or [HI], **fields})


def chat(*messages: dict[str, Any], can_think: bool = True, **fields: Any) -> ChatRequest:
    return parse(*messages, **fields).chat(can_think=can_think).chat


def conversation(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(*messages, **fields).conversation()


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("system", ["Be brief.\nAlways.", [text("Be brief."), text("Always.")]])
def test_system_comes_first(system: Any) -> None:
    assert conversation(HI, system=system) == [{"role": "system", "content": "Be brief.\nAlways."}, HI]


@pytest.mark.parametrize("system", [None, "", []])
def test_no_system(system: Any) -> None:
    assert conversation(HI, system=system) == [HI]


def test_a_message_of_the_system_stays_where_it_is() -> None:
    """In front it would change what is cached with every turn."""
    later = {"role": "system", "content": "Now in German."}
    assert conversation(HI, later, HI, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        HI,
        later,
        HI,
    ]


@pytest.mark.parametrize("hash_of_request", ["1f", "2e"])
@pytest.mark.parametrize("as_blocks", [False, True])
def test_what_claude_code_tells_its_host_is_not_read(hash_of_request: str, as_blocks: bool) -> None:
    header = f"x-anthropic-billing-header: cc_version=2; cch={hash_of_request};"
    system = [text(header), text("Be brief.")] if as_blocks else f"{header}\nBe brief."
    assert conversation(HI, system=system)[0] == {"role": "system", "content": "Be brief."}


def test_calls_and_their_results() -> None:
    said = conversation(HI, assistant(text("I look."), USE), user(RESULT, text("And now?")))
    called = said[1].pop("tool_calls")
    assert said == [
        HI,
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    (call,) = called
    assert (call["id"], call["type"], call["function"]["name"]) == ("toolu_1", "function", "weather")
    assert call["function"]["arguments"] == '{"place": "Köln"}'


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"content": [text("rain"), text("wind")]}, "rain\nwind"),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": "no such place", "is_error": True}, "Error: no such place"),
        ({"is_error": False}, "rain"),
    ],
)
def test_results(fields: Any, shown: str) -> None:
    assert conversation(HI, assistant(USE), user({**RESULT, **fields}))[-1]["content"] == shown


def test_thoughts_come_back_without_those_that_nobody_can_read() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    redacted = {"type": "redacted_thinking", "data": "EmwK"}
    said = conversation(HI, assistant(thought, redacted, text("Yes.")), HI)[1]
    assert said == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_neighbours_of_one_role_are_one_message() -> None:
    said = conversation(HI, user(text("you")), assistant(text("Hel"), text("lo")), assistant(USE), user(RESULT), HI, HI)
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "user"]
    assert [message["content"] for message in said] == ["Hi\nyou", "Hello", "rain", "Hi\nHi"]
    assert len(said[1]["tool_calls"]) == 1


def test_two_results_stay_two_messages() -> None:
    said = conversation(
        HI, assistant(USE, {**USE, "id": "toolu_2"}), user(RESULT, {**RESULT, "tool_use_id": "toolu_2"})
    )
    assert [message.get("tool_call_id") for message in said[-2:]] == ["toolu_1", "toolu_2"]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    continued = chat(HI, assistant(text("The answer is")))
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)
    assert chat(HI).continue_final_message is None


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.lists(st.text(max_size=4), max_size=3)), max_size=6)
)
def test_no_text_is_lost_and_roles_take_turns(turns: list[tuple[str, list[str]]]) -> None:
    messages = [HI, *({"role": role, "content": [text(words) for words in texts]} for role, texts in turns)]
    said = conversation(*messages)
    everything = "".join(words for _, texts in turns for words in texts)
    assert "".join(message["content"] for message in said).replace("\n", "") == "Hi" + everything.replace("\n", "")
    assert all(one["role"] != other["role"] for one, other in pairwise(said))


# ── the other fields ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("choice", "mode", "at_most"),
    [
        (None, "auto", None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", 1),
        ({"type": "any"}, "required", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", 1),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", None),
        ({"type": "tool", "name": "weather"}, "named", 1),
    ],
)
def test_tool_choice(choice: Any, mode: str, at_most: int | None) -> None:
    use = chat(tools=[TOOL], tool_choice=choice).tool_use()
    assert use is not None
    assert (use.mode, use.at_most, use.tools[0].name) == (mode, at_most, "weather")
    assert use.tools[0].parameters == TOOL["input_schema"]


def test_tool_choice_none() -> None:
    silent = chat(tools=[TOOL], tool_choice={"type": "none"})
    assert silent.tool_use() is None
    assert silent.tools == chat(tools=[TOOL]).tools, "the prompt still shows them"


def test_sampling() -> None:
    sampling = chat(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a", "b"], seed=7).sampling(
        {}, GrammarDefaults()
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 7)
    assert (sampling.stop, sampling.max_tokens) == (("a", "b"), 9)


def test_output_format_is_enforced() -> None:
    constraint = chat(output_config=FORMAT).sampling({}, GrammarDefaults()).constraint
    assert constraint is not None
    assert (json.loads(str(constraint.json_schema)), constraint.strict) == ({"type": "object"}, True)


def test_nothing_is_generated() -> None:
    read = chat(max_tokens=0, tools=[TOOL], tool_choice={"type": "any"}, output_config=FORMAT)
    sampling = read.sampling({}, GrammarDefaults())
    assert (sampling.max_tokens, sampling.constraint, read.tool_use()) == (0, None, None)
    assert read.tools == chat(tools=[TOOL]).tools


def test_marks_become_pins() -> None:
    hour = {**MARK, "ttl": "1h"}
    assert chat(HI).pin() is None
    assert chat(HI, cache_control=hour).pin() == PinWish(3600, None)
    assert chat(HI, tools=[{**TOOL, "cache_control": MARK}]).pin() == PinWish(300, 0)
    assert chat(HI, system=[text("a", cache_control=hour), text("b", cache_control=MARK)]).pin() == PinWish(3600, 0)
    turns = [HI, assistant({**USE, "cache_control": MARK}), user(RESULT, text("b"))]
    assert chat(*turns).pin() == PinWish(300, 1)
    assert chat(*turns[:2], user({**RESULT, "cache_control": hour}, text("b"))).pin() == PinWish(3600, 2)
    assert chat(user(text("a", cache_control=hour)), user(text("b", cache_control=MARK)), HI).pin() == PinWish(3600, 0)


@pytest.mark.parametrize(
    ("thinking", "wish", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True, False),
        ({"type": "adaptive"}, True, True),
        ({"type": "disabled"}, False, True),
    ],
)
def test_thinking(thinking: Any, wish: bool, shown: bool) -> None:
    asked = chat(max_tokens=2000, thinking=thinking)
    assert asked.chat_template_kwargs == {"enable_thinking": wish, "thinking": wish}
    assert asked.include_reasoning is shown


def test_thinking_of_a_model_without_thoughts() -> None:
    """What leaves it to the model is kept; what asks for thoughts is not."""
    assert chat(can_think=False, thinking={"type": "adaptive"}).chat_template_kwargs is None
    assert chat(can_think=False, thinking={"type": "disabled"}).chat_template_kwargs is not None
    with pytest.raises(InvalidParameter, match=r"'thinking' is enabled, but .* --reasoning-parser"):
        chat(max_tokens=2000, can_think=False, thinking={"type": "enabled", "budget_tokens": 1024})


def test_fields_of_the_request_win_over_thinking() -> None:
    asked = chat(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True, "x": 1})
    assert asked.chat_template_kwargs == {"enable_thinking": False, "thinking": True, "x": 1}


def test_count_tokens_needs_no_max_tokens_and_reads_the_same_prompt() -> None:
    body = {"messages": [HI], "system": "Be brief.", "tools": [TOOL]}
    counted = CountTokensRequest.parse(body).chat(can_think=True).chat
    asked = MessagesRequest.parse({**body, "max_tokens": 9}).chat(can_think=True).chat
    assert (counted.conversation(), counted.tools) == (asked.conversation(), asked.tools)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["image", "document", "audio", "search_result", "server_tool_use", "container_upload"])
@pytest.mark.parametrize("place", ["user", "assistant", "system", "result"])
def test_what_is_no_text_is_named(kind: str, place: str) -> None:
    block = {"type": kind, "source": {"type": "url", "url": "http://host/a.png"}}
    bodies: dict[str, tuple[Any, str]] = {
        "user": ({"messages": [user(text("a"), block)]}, "messages[0].content[1]"),
        "assistant": ({"messages": [HI, assistant(block)]}, "messages[1].content[0]"),
        "system": ({"messages": [HI], "system": [block]}, "system[0]"),
        "result": (
            {"messages": [user({**RESULT, "content": [text("a"), block]})]},
            "messages[0].content[0].content[1]",
        ),
    }
    fields, param = bodies[place]
    with pytest.raises(InvalidParameter) as caught:
        MessagesRequest.parse({"max_tokens": 1, **fields}).chat(can_think=True)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"'{param}' is a block of type '{kind}'")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({**RESULT, "tool_use_id": None})]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [user({**RESULT, "content": 1})]}, "messages[0].content[0].content"),
        ({"messages": [user({**RESULT, "content": ["a"]})]}, "messages[0].content[0].content"),
        ({"messages": [user(USE)]}, "messages[0].content[0]"),
        ({"messages": [HI, assistant(RESULT), HI]}, "messages[1].content[0]"),
        ({"messages": [HI, assistant({**USE, "input": "{}"}), HI]}, "messages[1].content[0]"),
        ({"messages": [HI, assistant(USE)]}, "messages[1].content"),
        (
            {"messages": [user(text("a"), text("b", cache_control={"type": "x"}))]},
            "messages[0].content[1].cache_control",
        ),
        ({"system": [text("a", cache_control=1)]}, "system[0].cache_control"),
        ({"system": 1}, "system"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [{**TOOL, "cache_control": 1}]}, "tools[0].cache_control"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {**FORMAT["format"], "strikt": 1}}}, "output_config.format.strikt"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"top_k": 0.5}, "top_k"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"tool_choise": "any"}, "tool_choise"),
    ],
)
def test_bad_fields_are_named_as_they_were_sent(fields: Any, param: str) -> None:
    body = {"max_tokens": 9, "messages": [HI], **fields}
    with pytest.raises(InvalidParameter) as caught:
        MessagesRequest.parse(body).chat(can_think=True).chat.pin()
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("stop", "stop_sequences"),
        ("stop_token_ids", "stop_token_ids"),
        ("temperature", "temperature"),
        ("messages", "messages"),
        ("messages[0]", "system"),
        ("messages[1].content", "messages[0].content"),
        ("response_format", "output_config.format.schema"),
        ("response_format.json_schema.schema.properties", "output_config.format.schema.properties"),
        ("tools[2].function.parameters.properties", "tools[2].input_schema.properties"),
        ("tools[2].function.name", "tools[2].name"),
        ("tool_choice.function.name", "tool_choice.name"),
    ],
)
def test_errors_of_the_chat_are_told_in_anthropics_names(ours: str, theirs: str) -> None:
    error = renamed(RequestError(f"'{ours}' is wrong.", param=ours), ["system", "messages[0].content"])
    assert (error.param, error.message, str(error)) == (theirs, f"'{theirs}' is wrong.", f"'{theirs}' is wrong.")
