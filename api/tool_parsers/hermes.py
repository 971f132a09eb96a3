"""The dialect of Hermes 2 Pro, Qwen 2.5, Qwen 3 and SmolLM3: a block of JSON for each call.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import CallForm, Steps
from trunkline.api.tool_parsers.json_calls import JsonCallsParser


class HermesParser(JsonCallsParser):
    """Also takes a list of calls in one block (SmolLM2's), and a block that isn't closed."""

    name = "hermes"
    aliases: ClassVar[tuple[str, ...]] = ("qwen", "qwen25")
    hints: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    form = CallForm(
        begin='<tool_call>\n{"name": "{name}", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    )
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def read(self) -> Steps[None]:
        while (yield from self.content_until("<tool_call>")):
            yield from self.attempt(self._block())

    def _block(self) -> Steps[None]:
        yield from self.skip_blanks()
        if (yield from self.begins_with("[")):
            yield from self.call_items()
        else:
            yield from self.call_object()
        yield from self.skip_blanks()
        yield from self.read_over("</tool_call>")
