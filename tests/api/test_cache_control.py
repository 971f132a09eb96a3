"""Marks: where they may stand, what they come to, and that no template sees them."""

from typing import Any

import pytest

from trunkline.api.cache_control import MAX_TTL, PinWish
from trunkline.api.prompt import render
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.template import ChatTemplate
from trunkline.errors import InvalidParameter, shown

MARK = {"type": "ephemeral"}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.parse(
        {"messages": [{"role": "user", "content": "hi", **message} for message in messages], **fields}
    )


def part(**fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": "hi", **fields}


def test_without_marks_nothing_is_pinned() -> None:
    assert chat({}).pin() is None
    assert CompletionRequest.parse({"prompt": "hi"}).pin() is None
    assert chat({"cache_control": None, "content": [part(cache_control=None)]}, cache_control=None).pin() is None


def test_whole_prompt() -> None:
    assert chat({}, cache_control=MARK).pin() == PinWish(300, None)
    assert CompletionRequest.parse({"prompt": "hi", "cache_control": {**MARK, "ttl": "1h"}}).pin() == PinWish(
        3600, None
    )


def test_up_to_the_last_marked_message_for_the_longest_time() -> None:
    long = {**MARK, "ttl": 900}
    assert chat({"cache_control": long}, {"content": [part(), part(cache_control=MARK)]}, {}).pin() == PinWish(900, 1)
    assert chat({"cache_control": long}, {}, cache_control=MARK).pin() == PinWish(900, None)


def test_a_tool_counts_as_the_first_message() -> None:
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": MARK}
    marked = chat({}, {}, tools=[tool], tool_choice="none")
    assert marked.pin() == PinWish(300, 0)


def test_templates_see_no_marks() -> None:
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": MARK}
    marked = chat({"cache_control": MARK, "content": [part(cache_control=MARK)]}, tools=[tool], tool_choice="none")
    everything = ChatTemplate("{{ messages }}{{ tools }}", special_tokens={})
    text = render(everything, marked)
    assert "cache_control" not in text
    assert "'name': 'f'" in text
    assert text == render(
        everything, chat({}, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    )


@pytest.mark.parametrize("ttl", ["5m", "1h", 1, MAX_TTL])
def test_ttl(ttl: str | int) -> None:
    assert chat({"cache_control": {**MARK, "ttl": ttl}}).pin() is not None


@pytest.mark.parametrize("mark", [{}, {"type": "permanent"}, "ephemeral", {**MARK, "ttl": "2d"}, {**MARK, "ttl": 0}])
@pytest.mark.parametrize("place", ["body", "message", "part", "tool"])
def test_bad_marks_are_named(mark: Any, place: str) -> None:
    with pytest.raises(InvalidParameter, match="cache_control") as refused:
        match place:
            case "body":
                chat({}, cache_control=mark)
            case "message":
                chat({}, {"cache_control": mark})
            case "part":
                chat({"content": [part(), part(cache_control=mark)]}).pin()
            case "tool":
                tool = {"type": "function", "function": {"name": "f"}, "cache_control": mark}
                chat({}, tools=[tool], tool_choice="none").pin()
    where = {"body": "", "message": "messages[1].", "part": "messages[0].content[1].", "tool": "tools[0]."}[place]
    assert str(refused.value.param).startswith(f"{where}cache_control")


@pytest.mark.parametrize("ttl", [MAX_TTL + 1, 1.5, True, "", None])
def test_bad_ttl(ttl: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        chat({"cache_control": {**MARK, "ttl": ttl}})
    assert str(refused.value) == (
        f"'messages[0].cache_control.ttl' is {shown(ttl)}; allowed is '5m', '1h' or seconds from 1 to 86400."
    )
    with pytest.raises(InvalidParameter) as refused:
        chat({"content": [part(cache_control={**MARK, "ttl": ttl})]}).pin()
    assert str(refused.value).endswith(
        "; allowed is {'type': 'ephemeral', 'ttl': …}, where ttl is '5m', '1h' or seconds from 1 to 86400."
    )
