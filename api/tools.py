"""`tools`, `tool_choice` and `parallel_tool_calls` of a request: read, checked, and what they say a model must write.

    use = read_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)      # None: nothing may be called
    use.mode                                                                      # "auto", "required" or "named"
    tags = use.tags(HermesParser.form)                                            # for a Constraint

| tool_choice           | what the model writes                                                                 |
|-----------------------|---------------------------------------------------------------------------------------|
| "auto", or left out   | text, calls, or both. Arguments of strict tools follow their schema, others are objects |
| "required"            | at least one call, nothing else. All arguments follow their schema                     |
| a function            | exactly one call, of that function                                                     |
| allowed_tools         | of these tools only; else as its mode, "auto" or "required", says                      |
| "none"                | text                                                                                   |

The prompt shows all tools, whatever the choice: it stays the same, and so does what is cached of it. Knows no engine.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trunkline.api.tool_parsers.base import CallForm, ToolNames
from trunkline.constraint import Tag, Tags
from trunkline.errors import InvalidParameter

MAX_TOOLS = 128
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of the arguments of a function without `parameters`: only `{}`."""
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of a function, or of a schema
NAME_ALLOWED = "1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", "allowed_tools":'
    ' {"mode": …, "tools": […]}}'
)


class Tool(NamedTuple):
    """A function that may be called.

    parameters  the JSON schema of its arguments
    strict      they follow it, whatever `tool_choice` is
    where       of the parameters in the request
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    where: str


class ToolUse(NamedTuple):
    """What may be called, and what must.

    tools     that may be called
    mode      "auto", "required" or "named"
    at_most   calls in one answer; None: any number
    is_subset  the request has more tools than these
    """

    tools: tuple[Tool, ...]
    mode: str
    at_most: int | None
    is_subset: bool = False

    @property
    def is_forced(self) -> bool:
        """The answer is one or more calls, and nothing else."""
        return self.mode != "auto"

    @property
    def names(self) -> ToolNames:
        """What a parser is told."""
        parameters = {tool.name: tool.parameters for tool in self.tools}
        return ToolNames(frozenset(parameters), is_exclusive=self.is_subset, parameters=parameters)

    def promises(self, tool: Tool) -> bool:
        """Whether the arguments of its calls follow its schema."""
        return self.is_forced or tool.strict

    def tags(self, form: CallForm, *, instead: Tag | None = None, special_tokens: tuple[str, ...] = ()) -> Tags:
        """Calls in this form, with these special tokens in it. `instead`: or JSON that follows its schema, and no other text."""
        arguments = [(tool.name, self._arguments(tool)) for tool in self.tools]
        return form.tags(
            arguments, forced=self.is_forced, at_most=self.at_most, instead=instead, special_tokens=special_tokens
        )

    def _arguments(self, tool: Tool) -> Tag:
        is_enforced = self.promises(tool) or tool.parameters is NOTHING
        schema = tool.parameters if is_enforced else {"type": "object"}
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"'{tool.where}' is no JSON schema: {error}.", param=tool.where) from None
        return Tag(begin="", json_schema=text, end="", where=tool.where, name=tool.name, strict=tool.strict)


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """What may and must be called; None: nothing is. Raises InvalidParameter, naming the parameter."""
    if not tools:
        if choice not in (None, "none"):
            raise InvalidParameter("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter.of("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    read = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    by_name = {tool.name: tool for tool in read}
    if len(by_name) < len(read):
        names = [tool.name for tool in read]
        at, name = next((at, name) for at, name in enumerate(names) if name in names[:at])
        raise InvalidParameter(
            f"'tools[{at}].function.name' is {name!r}, as that of another tool is; each must have a name of its own.",
            param=f"tools[{at}].function.name",
        )
    at_most = 1 if parallel is False else None
    match choice:
        case None | "auto":
            return ToolUse(read, "auto", at_most)
        case "none":
            return None
        case "required":
            return ToolUse(read, "required", at_most)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolUse((_known(name, by_name, "tool_choice.function.name"),), "named", 1, is_subset=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            return ToolUse(_subset(allowed, by_name), mode, at_most, is_subset=True)
    raise InvalidParameter.of("tool_choice", choice, f"one of {_CHOICES}")


def _read_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidParameter.of(where, tool, "an object")
    if tool.get("type") != "function":
        raise InvalidParameter.of(f"{where}.type", tool.get("type"), '"function": other tools are not served here')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter.of(f"{where}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidParameter.of(f"{where}.function.name", name, NAME_ALLOWED)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidParameter.of(f"{where}.function.description", description, "a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter.of(f"{where}.function.strict", strict, "true or false")
    place = f"{where}.function.parameters"
    return Tool(name, _read_parameters(function.get("parameters"), place), bool(strict), place)


def _read_parameters(parameters: Any, where: str) -> Mapping[str, Any]:
    """The schema of an object: arguments are nothing else."""
    if parameters is None:
        return NOTHING
    if not isinstance(parameters, Mapping):
        raise InvalidParameter.of(where, parameters, "a JSON schema, which is an object")
    kind = parameters.get("type")
    if kind is None:
        # Beside a reference it might be ignored (draft 7); what that leads to is then checked with the rest of the schema.
        return parameters if "$ref" in parameters else {"type": "object", **parameters}
    if kind == ["object"] or kind == "object":
        return parameters
    if isinstance(kind, list) and "object" in kind:
        return {**parameters, "type": "object"}
    raise InvalidParameter.of(f"{where}.type", kind, '"object": arguments are the properties of an object')


def _subset(allowed: list[Any], by_name: Mapping[str, Tool]) -> tuple[Tool, ...]:
    """In the order of `tools`, whatever that of `allowed`: the same grammar for the same tools."""
    names = set()
    for index, tool in enumerate(allowed):
        where = f"tool_choice.allowed_tools.tools[{index}]"
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                names.add(_known(name, by_name, f"{where}.function.name").name)
            case _:
                raise InvalidParameter.of(where, tool, '{"type": "function", "function": {"name": …}}')
    if not names:
        raise InvalidParameter.of("tool_choice.allowed_tools.tools", allowed, "a list of at least one tool")
    return tuple(tool for tool in by_name.values() if tool.name in names)


def _known(name: str, by_name: Mapping[str, Tool], where: str) -> Tool:
    if name not in by_name:
        known = ", ".join(map(repr, list(by_name)[:10])) + (", …" if len(by_name) > 10 else "")
        raise InvalidParameter.of(where, name, f"the name of one of 'tools': {known}")
    return by_name[name]
