"""The items of a response's conversation, as messages of a chat.

    message (user, system, developer)   a message
    reasoning, message, function_call…  one message of the assistant: what it thought, said and called
    function_call_output                a message of a tool

Items that are sent and items that were answered have one form, the one in which they are kept. Knows no engine and no HTTP.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trunkline.api.cache_control import NAME as CACHE_CONTROL
from trunkline.api.protocol import MAX_MESSAGES
from trunkline.errors import InvalidParameter

ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

Item = dict[str, Any]


class Placed(NamedTuple):
    """An item, and the parameter that brought it."""

    place: str
    item: Item


class Conversation(NamedTuple):
    """Messages of a chat, and for each the parameter that brought it."""

    messages: list[dict[str, Any]]
    places: list[str]


def new_id(kind: str) -> str:
    """Of an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def read_input(given: str | list[dict[str, Any]]) -> list[Item]:
    """What was sent, checked, in the form in which it is kept. Raises InvalidParameter, naming the parameter."""
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    if len(given) > MAX_MESSAGES:
        raise InvalidParameter.of("input", f"{len(given)} items", f"at most {MAX_MESSAGES}")
    return [_read_item(item, f"input[{index}]") for index, item in enumerate(given)]


def converse(instructions: str | None, items: Iterable[Placed]) -> Conversation:
    """Raises InvalidParameter for the output of a function that was not called."""
    conversation = Conversation([], [])
    calls: dict[str, str] = {}  # id -> name of the function
    thoughts: list[str] = []
    turn: dict[str, Any] | None = None  # of the assistant, which calls may still join
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
        conversation.places.append("instructions")
    for place, item in items:
        kind = item["type"]
        if kind == "reasoning":
            thoughts += [part["text"] for part in item.get("content") or item.get("summary") or ()]
            turn = None
            continue
        if kind == "function_call":
            if turn is None:
                turn = _turn(conversation, place, thoughts)
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
            calls[item["call_id"]] = item["name"]
            continue
        if kind == "message" and item["role"] == "assistant":
            turn = _turn(conversation, place, thoughts)
            turn["content"] = _content(item["content"])
            continue
        turn, thoughts = None, []
        if kind == "message":
            message = {"role": item["role"], "content": _content(item["content"])}
        else:
            call_id = item["call_id"]
            if call_id not in calls:
                raise InvalidParameter.of(f"{place}.call_id", call_id, "the 'call_id' of a function_call before it")
            message = {"role": "tool", "tool_call_id": call_id, "name": calls[call_id]}
            message["content"] = _content(item["output"])
        conversation.messages.append(message)
        conversation.places.append(place)
    return conversation


def _turn(conversation: Conversation, place: str, thoughts: list[str]) -> dict[str, Any]:
    """A new message of the assistant, with what was thought before it."""
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
        thoughts.clear()
    conversation.messages.append(turn)
    conversation.places.append(place)
    return turn


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """A chat's. One text without marks is just that: templates see the same, whoever writes it."""
    if isinstance(content, str):
        return content
    parts = [{"type": "text", "text": part.get("text", part.get("refusal"))} for part in content]
    for part, source in zip(parts, content, strict=True):
        if source.get(CACHE_CONTROL) is not None:
            part[CACHE_CONTROL] = source[CACHE_CONTROL]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and CACHE_CONTROL not in parts[0] else parts


def _read_item(item: Mapping[str, Any], where: str) -> Item:
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            return _message(item, where)
        case "function_call":
            fields: dict[str, Any] = {name: _text(item, name, where) for name in ("call_id", "name", "arguments")}
            return _kept(kind, item, fields, where)
        case "function_call_output":
            fields = {
                "call_id": _text(item, "call_id", where),
                "output": _output(item.get("output"), f"{where}.output"),
            }
            return _kept(kind, item, fields, where)
        case "reasoning":
            fields = {
                "summary": _parts(item.get("summary") or [], f"{where}.summary"),
                "content": _parts(item.get("content") or [], f"{where}.content"),
            }
            return _kept(kind, item, fields, where)
        case "item_reference":
            allowed = (
                "an item itself: single items are not kept here; 'previous_response_id' continues a whole response"
            )
            raise _unsupported(f"{where}.type", kind, allowed)
    raise _unsupported(f"{where}.type", kind, " or ".join(f'"{known}"' for known in _KINDS))


def _message(item: Mapping[str, Any], where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise InvalidParameter.of(f"{where}.role", role, " or ".join(f'"{known}"' for known in ROLES))
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        parts: list[dict[str, Any]] = [{"type": kind, "text": content}]
    elif isinstance(content, list):
        parts = _parts(content, f"{where}.content", texts=kind)
    else:
        raise InvalidParameter.of(f"{where}.content", content, "a string or an array of text parts")
    for part in parts:
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return _kept("message", item, {"role": role, "content": parts}, where)


def _output(output: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        return _parts(output, where)
    raise InvalidParameter.of(where, output, "a string or an array of text parts")


def _parts(parts: Any, where: str, texts: str = "") -> list[dict[str, Any]]:
    """Text parts, copied. `texts`: the type that one of a chat, "text", becomes."""
    if not isinstance(parts, list):
        raise InvalidParameter.of(where, parts, "an array of text parts")
    read = []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (*TEXT_PARTS, "refusal"):
            allowed = 'a text part, such as {"type": "input_text", "text": …}: this model reads text only'
            raise _unsupported(at, part, allowed)
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise InvalidParameter.of(f"{at}.{name}", part.get(name), "a string")
        read.append({**part, "type": texts} if kind == "text" and texts else dict(part))
    return read


def _kept(kind: str, item: Mapping[str, Any], fields: dict[str, Any], where: str) -> Item:
    given = item.get("id")
    if given is not None and not isinstance(given, str):
        raise InvalidParameter.of(f"{where}.id", given, "a string")
    return {"id": given or new_id(kind), "type": kind, "status": "completed", **fields}


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidParameter.of(f"{where}.{name}", value, "a string")
    return value


def _unsupported(param: str, seen: Any, allowed: str) -> InvalidParameter:
    error = InvalidParameter.of(param, seen, allowed)
    error.code = "unsupported_value"
    return error
