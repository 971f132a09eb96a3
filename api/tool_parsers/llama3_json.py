"""The dialect of Llama 3.1 and 3.2, and of Llama 4 where its template asks for JSON: a bare object, with "parameters".

{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
<|python_tag|>{"name": "f", "parameters": {"a": 1}}
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import CallForm, Steps
from trunkline.api.tool_parsers.json_calls import JsonCallsParser

_TAGS = ("<|python_tag|>", "<|python_start|>")
# How an object begins that may be a call: other JSON is text that need not be held back.
_BEGINNINGS = tuple(
    f'{{{blank}"{key}"' for key in ("name", "type", "function", "parameters") for blank in ("", " ", "\n  ")
)


class Llama3JsonParser(JsonCallsParser):
    """More than one call was never trained for. Those that come are taken, with or without semicolons between them."""

    name = "llama3_json"
    aliases: ClassVar[tuple[str, ...]] = ("llama3", "llama4_json")
    hints: ClassVar[tuple[str, ...]] = ("dictionary of argument name", "<|python_tag|>")
    form = CallForm(
        begin='{"name": "{name}", "parameters": ',
        end="}",
        separator="; ",
        trigger='{"name": ',
        free_tokens=(*_TAGS, "<|python_end|>"),
    )
    markers: ClassVar[tuple[str, ...]] = (*_TAGS, "<|python_end|>")

    def read(self) -> Steps[None]:
        while (yield from self.content_until(*_TAGS, *_BEGINNINGS)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        assert self._held is not None
        if not self._text.startswith(_TAGS, self._held):
            self.unread()
        yield from self.skip_blanks()
        yield from self.call_object()
        while (yield from self._continues()):
            yield from self.call_object()

    def _continues(self) -> Steps[bool]:
        yield from self.skip_blanks()
        if (yield from self.read_over("<|python_end|>")):
            self.hold_from_here()
            yield from self.skip_blanks()
        if (yield from self.begins_with(";")):
            yield from self.skip_blanks()
        if (yield from self.peek()) == "{":
            return True
        self.put_back()
        return False
