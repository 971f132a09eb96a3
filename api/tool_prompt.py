"""Tools for models whose chat template does not show any: told in words, in the form that SmolLM2 was trained on.

    system      <tools>[{"type": "function", …}, …]</tools>, and how to call them; then the system message of the request
    assistant   <tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>
    user        <tool_response>
                what the tool said
                </tool_response>

The tools stand first and in the order in which they were sent, so that they are cached for every conversation that has them.
Works on messages as templates get them (template.normalize_messages). Knows no template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.api.tool_parsers.smollm import SmolLMParser
from trunkline.errors import InvalidParameter

FORM = SmolLMParser.form
Messages = list[dict[str, Any]]

_HOW = """You can call functions. These are given, each with a JSON schema of its parameters:
<tools>{tools}</tools>

To call functions, answer with a list of calls and no other text, in this form:
<tool_call>[{{"name": "function_name", "arguments": {{"parameter_name": "value"}}}}]</tool_call>

The result of each call comes back between <tool_response> and </tool_response>. If no function helps, answer in words."""


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the model is told."""
    return _HOW.format(tools=json.dumps([_shown(tool) for tool in tools], ensure_ascii=False))


def with_tools_in_system(messages: Messages, description: str) -> Messages:
    """The description before what the system message says."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": description}, *messages]
    return [_before(description, messages[0]), *messages[1:]]


def with_tools_in_user(messages: Messages, description: str) -> Messages:
    """The description before the first message of the user: for templates that take no system message."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return [*messages[:index], _before(description, message), *messages[index + 1 :]]
    return [{"role": "user", "content": description}, *messages]


def calls_as_text(messages: Messages, sent: Sequence[Mapping[str, Any]]) -> Messages:
    """Calls and their results as text, in turns that every template knows: results are the user's.

    sent  the same messages before they were normalized: arguments stand there as the model wrote them, and so they are
          found in the cache
    """
    said: Messages = []
    is_result = False  # the last one said
    for message, original in zip(messages, sent, strict=True):
        was_result, is_result = is_result, message["role"] in ("tool", "function")
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                said[-1]["content"] += "\n" + result
            else:
                said.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            calls = [_call(*both) for both in zip(message["tool_calls"], original["tool_calls"], strict=True)]
            text = FORM.write(calls)
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            said.append({**others, "content": f"{message['content']}\n{text}" if message["content"] else text})
        else:
            said.append(message)
    return said


def _shown(tool: Mapping[str, Any]) -> Any:
    """The function's own description, without what only the server needs to know."""
    function = tool.get("function")
    return {key: value for key, value in function.items() if key != "strict"} if isinstance(function, Mapping) else tool


def _call(call: Any, original: Any) -> tuple[str, str]:
    """Name, and arguments as JSON text. Raises InvalidParameter for what is no call."""
    match call, original:
        case {"function": {"name": str(name), "arguments": dict()}}, {"function": {"arguments": str(text)}}:
            return name, text.strip() or "{}"
        case {"function": {"name": str(name)} as function}, _:
            return name, json.dumps(function.get("arguments", {}), ensure_ascii=False)
    raise InvalidParameter.of("messages", call, "in tool_calls, objects with a 'function' and its name")


def _before(description: str, message: dict[str, Any]) -> dict[str, Any]:
    content = f"{description}\n\n{message['content']}" if message["content"] else description
    return {**message, "content": content}
