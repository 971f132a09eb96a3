"""The body of /v1/responses: what it becomes, what is refused, and in whose words."""

from typing import Any

import pytest

from trunkline.api.protocol import MAX_MESSAGES
from trunkline.api.response_format import GrammarDefaults
from trunkline.api.responses_items import Placed, converse, read_input
from trunkline.api.responses_protocol import ResponsesRequest, in_own_words, own_words
from trunkline.errors import ContextLengthExceeded, InvalidParameter
from trunkline.sampling import SamplingParams

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "description": "F", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "F", "parameters": SCHEMA, "strict": True}}


def wanted(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse({"input": "Hi", **fields})


def chat_of(**fields: Any) -> Any:
    request = wanted(**fields)
    conversation = converse(request.instructions, [Placed("input", item) for item in read_input(request.input)])
    with in_own_words(conversation.places):
        return request.chat(conversation)


def sampling_of(**fields: Any) -> SamplingParams:
    chat = chat_of(**fields)
    with in_own_words():
        sampling: SamplingParams = chat.sampling({}, GrammarDefaults())
    return sampling


def test_sampling_is_that_of_a_chat() -> None:
    sampling = sampling_of(
        max_output_tokens=7, temperature=0.5, top_p=0.25, seed=3, stop=["x"], top_k=4, logit_bias={"1": 2}
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.25, 3)
    assert (sampling.stop, sampling.top_k, sampling.logit_bias) == (("x",), 4, {1: 2})
    assert sampling_of().max_tokens is None
    assert sampling_of().logprobs is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 2}, 2),
        ({"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, 2),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_logprobs(fields: Any, logprobs: int | None) -> None:
    assert sampling_of(**fields).logprobs == logprobs


def test_format() -> None:
    chat = chat_of(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}})
    assert chat.response_format.constraint() == {"json_schema": SCHEMA, "strict": True, "name": "n"}
    assert chat_of(text={"format": {"type": "json_object"}}).response_format.constraint() == {"json_object": True}
    assert chat_of(text={"format": {"type": "text"}}).response_format.constraint() is None
    assert chat_of(text={"verbosity": "low"}).response_format is None
    assert sampling_of(guided_regex="a+").constraint is not None, "vLLM's spellings are those of chats"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
        ),
    ],
)  # fmt: skip
def test_tools(choice: Any, expected: Any) -> None:
    chat = chat_of(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert (chat.tools, chat.tool_choice, chat.parallel_tool_calls) == ([CHAT_TOOL], expected, False)


def test_auto_is_no_choice_where_there_are_no_tools() -> None:
    assert chat_of(tool_choice="auto").tool_use() is None
    assert chat_of(tool_choice="auto", tools=[]).tool_use() is None


def test_null_is_nothing() -> None:
    fields = [name for name in ResponsesRequest.model_fields if name != "input"]
    assert chat_of(**dict.fromkeys(fields)).sampling({}, GrammarDefaults()) == sampling_of()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": None}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "1"}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["output"]}, "include[0]"),
        ({"truncation": "some"}, "truncation"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": 1}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "name": "n"}}}, "text.format.name"),
        ({"text": {"format": "text"}}, "text.format"),
        ({"text": "x"}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [CHAT_TOOL]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools[0]",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ],
)  # fmt: skip
def test_refused_by_its_own_name(fields: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        sampling_of(**fields)
    assert raised.value.param == param
    assert param in raised.value.message
    assert str(raised.value) == raised.value.message


def test_many_messages() -> None:
    items = [{"role": "user", "content": "x"}] * MAX_MESSAGES
    with pytest.raises(InvalidParameter) as raised:
        chat_of(input=items, instructions="One more.")
    assert raised.value.param == "input"


def test_errors_name_the_item_that_a_message_came_from() -> None:
    places = ["instructions", "input[4]"]
    assert own_words("'messages[1].content' is 3.", places) == "'input[4].content' is 3."
    assert own_words("messages[0]", places) == "instructions"
    assert own_words("'messages' is odd; messages differ.", places) == "'input' is odd; messages differ."


def test_a_context_that_is_too_long_is_told_of_the_input() -> None:
    with pytest.raises(ContextLengthExceeded) as raised, in_own_words():
        raise ContextLengthExceeded(limit=10, seen=11)
    assert raised.value.param == "input"
    assert "your input resulted in 11 tokens. Please reduce the length of the input." in raised.value.message
