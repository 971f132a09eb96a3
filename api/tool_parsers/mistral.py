"""Mistral's dialects. Those of its tokenizers up to version 7, and from 11 on:

[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}
[TOOL_CALLS]f[CALL_ID]0a1B2c3D4[ARGS]{"a": 1}

Source of the rule for ids, nine letters and digits: mistral-common, src/mistral_common/protocol/instruct/validator.py.
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import CallForm, Ended, Steps, ToolParser, random_id
from trunkline.api.tool_parsers.json_calls import JsonCallsParser

ID_LENGTH = 9


class MistralParser(JsonCallsParser):
    """Reads all of them, and forces the older."""

    name = "mistral"
    hints: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    form = CallForm(
        opening="[TOOL_CALLS] [",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        separator=", ",
        closing="]",
        trigger="[TOOL_CALLS]",
    )
    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    @classmethod
    def fitting(cls, template: str) -> type[ToolParser]:
        return Mistral11Parser if "[ARGS]" in template else cls

    def new_id(self) -> str:
        return random_id(ID_LENGTH)

    def read(self) -> Steps[None]:
        while (yield from self.content_until("[TOOL_CALLS]")):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        yield from self.skip_blanks()
        if (yield from self.begins_with("[")):
            yield from self.call_items()
        elif (yield from self.peek()) == "{":
            yield from self.call_object()
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        name = yield from self.word("[{")
        if not (yield from self.peek()):
            raise Ended  # maybe in the middle of the name
        call_id = ""
        if (yield from self.read_over("[CALL_ID]")):
            call_id = (yield from self.word("[{")).strip()
        yield from self.read_over("[ARGS]")
        is_usable = len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum() and call_id not in self.ids
        yield from self.call_of(name, call_id if is_usable else "")


class Mistral11Parser(MistralParser):
    """Reads all of them, and forces the newer."""

    name = "mistral_v11"
    hints: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS] … [ARGS]",)
    form = CallForm(begin="[TOOL_CALLS]{name}[ARGS]", end="", separator="", trigger="[TOOL_CALLS]")
