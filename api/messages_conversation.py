"""The messages of Anthropic's API as those of a chat.

    conversation = Conversation()
    conversation.add_system("Be brief.", "system")
    conversation.add_user([{"type": "text", "text": "Hi"}], "messages[0].content")
    conversation.fields()        # {"messages": […]}, of a ChatRequest
    conversation.origins         # ["system", "messages[0].content"]: where each of them came from

| Anthropic                                  | chat                                                                  |
|--------------------------------------------|-----------------------------------------------------------------------|
| `system`, messages of the system           | messages of the system, each where it stands                          |
| `tool_use` in a message of the assistant   | `tool_calls`                                                          |
| `tool_result` in a message of the user     | a message of the tool                                                 |
| `thinking` in a message of the assistant   | `reasoning_content`; `redacted_thinking` is dropped                   |
| `cache_control` on a block                 | the same on its message                                               |
| neighbours, both of the user or assistant  | one message                                                           |
| a last message of the assistant            | `continue_final_message`                                              |

Whatever is no text is refused, by its name in the request. Knows no engine and no HTTP.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from trunkline.api.cache_control import NAME as CACHE_CONTROL
from trunkline.api.cache_control import CacheControl, marks_in
from trunkline.errors import InvalidParameter, shown

# Claude Code writes this into its system prompt, with a hash that differs in every request: nothing behind it would ever
# be found in the cache. It is addressed to Anthropic, not to the model.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
Content = str | list[dict[str, Any]]


class Conversation:
    """Messages of a chat, as they come together."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self.origins: list[str] = []

    def fields(self) -> dict[str, Any]:
        """Of the chat. A last message of the assistant is what the answer goes on with."""
        last = self._messages[-1] if self._messages else {"role": ""}
        if last["role"] != "assistant":
            return {"messages": self._messages}
        if "tool_calls" in last:
            where = self.origins[-1]
            raise InvalidParameter(
                f"'{where}' ends the conversation with a 'tool_use'; its 'tool_result' must follow in a message of the user.",
                param=where,
            )
        return {"messages": self._messages, "continue_final_message": True, "add_generation_prompt": False}

    def add_system(self, content: Content, where: str) -> None:
        """`where` is the name of the content in the request, here and below."""
        blocks = _blocks(content, where)
        texts = [_BILLING.sub("", _text(block, f"{where}[{index}]")) for index, block in enumerate(blocks)]
        if text := "\n".join(filter(None, texts)):
            self._add({"role": "system", "content": text}, blocks, where)

    def add_user(self, content: Content, where: str) -> None:
        for index, block in enumerate(_blocks(content, where)):
            place = f"{where}[{index}]"
            if block.get("type") == "tool_result":
                self._add(_result(block, place), [block], where)
            else:
                self._add({"role": "user", "content": _text(block, place)}, [block], where)

    def add_assistant(self, content: Content, where: str) -> None:
        """The texts of one answer are one text, as it was written."""
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(blocks := _blocks(content, where)):
            match block:
                case {"type": "tool_use"}:
                    calls.append(_call(block, f"{where}[{index}]"))
                case {"type": "thinking", "thinking": str(thought)}:
                    thoughts.append(thought)
                case {"type": "redacted_thinking"}:
                    pass
                case _:
                    texts.append(_text(block, f"{where}[{index}]"))
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._add(message, blocks, where)

    def _add(self, message: dict[str, Any], blocks: list[dict[str, Any]], where: str) -> None:
        """With the longest mark of the blocks that it was made of."""
        marks = [mark.control for mark in marks_in(blocks, where, 0)]
        if self._messages and message["role"] == self._messages[-1]["role"] in ("user", "assistant"):
            before = self._messages.pop()
            marks += [CacheControl(**before[CACHE_CONTROL])] if CACHE_CONTROL in before else []
            message = _together(before, message)
        else:
            self.origins.append(where)
        if marks:
            message[CACHE_CONTROL] = max(marks, key=lambda control: control.seconds).model_dump()
        self._messages.append(message)


def _together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role."""
    message = {**first, **second}
    for name in ("content", "reasoning_content"):
        if texts := [text for text in (first.get(name), second.get(name)) if text]:
            message[name] = "\n".join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message


def _blocks(content: Content, where: str) -> list[dict[str, Any]]:
    """One at least. Raises InvalidParameter for a bad mark on one."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    marks_in(content, where, 0)
    return content or [{"type": "text", "text": ""}]


def _text(block: Mapping[str, Any], where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise InvalidParameter.of(f"{where}.text", block.get("text"), "a string")
    raise InvalidParameter(
        f"'{where}' is a block of type {shown(block.get('type'))}, which cannot be read here: this model reads text only.",
        param=where,
    )


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidParameter.of(f"{where}.tool_use_id", block.get("tool_use_id"), "the id of a 'tool_use'")
    content = block.get("content")
    match content:
        case None:
            text = ""
        case str():
            text = content
        case list() if all(isinstance(part, Mapping) for part in content):
            text = "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
        case _:
            raise InvalidParameter.of(f"{where}.content", content, "a string or an array of text blocks")
    # No template has a place for it, and the model should know.
    text = f"Error: {text}" if block.get("is_error") is True else text
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    match block:
        case {"id": str(call_id), "name": str(name), "input": dict(arguments)}:
            try:
                text = json.dumps(arguments, ensure_ascii=False)
            except RecursionError:
                raise InvalidParameter(f"'{where}.input' is nested too deeply.", param=f"{where}.input") from None
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    raise InvalidParameter.of(where, block, "a tool_use with 'id', 'name' and 'input', an object")
