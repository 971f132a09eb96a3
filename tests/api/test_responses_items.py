"""Items of a conversation become messages of a chat, in the form in which a chat would have had them."""

from typing import Any

import pytest

from trunkline.api.protocol import MAX_MESSAGES
from trunkline.api.responses_items import Placed, converse, read_input
from trunkline.errors import InvalidParameter

CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Well,", "annotations": [], "logprobs": []}],
}
ASK = {"role": "user", "content": "Hi"}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def messages_of(given: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    items = read_input(given)
    conversation = converse(instructions, [Placed(f"input[{index}]", item) for index, item in enumerate(items)])
    assert len(conversation.messages) == len(conversation.places)
    return conversation.messages


def test_text() -> None:
    assert messages_of("Hi") == [ASK]
    assert messages_of("Hi", "Be brief.") == [{"role": "system", "content": "Be brief."}, ASK]
    assert messages_of("") == [{"role": "user", "content": ""}]


def test_messages_and_their_parts() -> None:
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "system", "content": "c"},
        {"role": "user", "content": [{"type": "text", "text": "d"}], "status": "completed", "id": "msg_1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": []},
    ]
    assert messages_of(given) == [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": ""},
    ]


def test_marks_stay() -> None:
    mark = {"type": "ephemeral"}
    (message,) = messages_of(
        [{"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": mark}]}]
    )
    assert message["content"] == [{"type": "text", "text": "a", "cache_control": mark}]


def test_what_the_assistant_did_at_once_is_one_message() -> None:
    second = {**CALL, "call_id": "call_2", "name": "g"}
    outputs = [OUTPUT, {**OUTPUT, "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]}]
    assert messages_of([ASK, THOUGHT, SAID, CALL, second, *outputs, SAID]) == [
        ASK,
        {
            "role": "assistant",
            "content": "Well,",
            "reasoning_content": "Hm.",
            "tool_calls": [
                CHAT_CALL,
                {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_2", "name": "g", "content": "rain"},
        {"role": "assistant", "content": "Well,"},
    ]


def test_thoughts_begin_a_message_and_belong_to_what_follows_them() -> None:
    assert messages_of([ASK, CALL, THOUGHT, CALL]) == [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CHAT_CALL]},
    ]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert messages_of([ASK, summary, SAID])[1] == {"role": "assistant", "content": "Well,", "reasoning_content": "Hm."}
    assert messages_of([ASK, THOUGHT, ASK, SAID])[2] == {"role": "assistant", "content": "Well,"}, (
        "nobody said what was thought"
    )


def test_places_say_where_a_message_came_from() -> None:
    items = [Placed(f"input[{index}]", item) for index, item in enumerate(read_input([THOUGHT, CALL, OUTPUT, ASK]))]
    assert converse("x", items).places == ["instructions", "input[1]", "input[2]", "input[3]"]


def test_items_are_kept_with_ids() -> None:
    assert all(item["id"] and item["status"] == "completed" for item in read_input([ASK, SAID, CALL, OUTPUT, THOUGHT]))
    assert read_input([{**CALL, "id": "fc_9"}])[0]["id"] == "fc_9"
    assert read_input("Hi")[0]["content"] == [{"type": "input_text", "text": "Hi"}]
    assert read_input([{"role": "assistant", "content": "Hi"}])[0]["content"] == [
        {"type": "output_text", "text": "Hi", "annotations": []}
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({}, "input[0].type"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"type": "message", "content": "x"}, "input[0].role"),
        ({"role": ["user"], "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": {"text": "x"}}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text", "text": 1}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, "input[0].content[0].refusal"),
        ({"role": "user", "content": "x", "id": 1}, "input[0].id"),
        ({"type": ["message"]}, "input[0].type"),
        ({**CALL, "arguments": {}}, "input[0].arguments"),
        ({**CALL, "name": None}, "input[0].name"),
        ({**OUTPUT, "output": {"a": 1}}, "input[0].output"),
        ({**OUTPUT, "call_id": 3}, "input[0].call_id"),
        ({**THOUGHT, "content": "Hm."}, "input[0].content"),
        ({**THOUGHT, "summary": [{"type": "summary_text"}]}, "input[0].summary[0].text"),
        (OUTPUT, "input[0].call_id"),
    ],
)
def test_refused(item: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        messages_of([item])
    assert raised.value.param == param


def test_too_many() -> None:
    with pytest.raises(InvalidParameter, match="at most"):
        read_input([ASK] * (MAX_MESSAGES + 1))
