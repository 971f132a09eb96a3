"""The dialects of FunctionGemma and of Gemma 4: objects with bare keys, and marks for quotes.

<start_function_call>call:f{place:<escape>Ulm<escape>,days:3}<end_function_call>
<|tool_call>call:f{place:<|"|>Ulm<|"|>,days:3}<tool_call|>
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from trunkline.api.tool_parsers.base import Steps
from trunkline.api.tool_parsers.literals import LiteralParser


class FunctionGemmaParser(LiteralParser):
    """Texts in JSON's quotes are taken too; of what has none, numbers and constants are that, and the rest is text.

    opening, closing  of a call
    """

    name = "functiongemma"
    hints: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    opening: ClassVar[str] = "<start_function_call>"
    closing: ClassVar[str] = "<end_function_call>"
    brackets: ClassVar[Mapping[str, str]] = MappingProxyType({"[": "]", "{": "}"})
    quotes: ClassVar[tuple[str, ...]] = ("<escape>", '"')
    raw_quotes: ClassVar[tuple[str, ...]] = ("<escape>",)
    key_ends: ClassVar[str] = ",:[]{}"
    word_ends: ClassVar[str] = ",[]{}"
    markers: ClassVar[tuple[str, ...]] = (opening, closing, "<escape>")

    def read(self) -> Steps[None]:
        while (yield from self.content_until(self.opening)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        yield from self.skip_blanks()
        yield from self.expect("call:")
        name = yield from self.until("{")
        yield from self.start_call(name.strip())
        yield from self.pairs(depth=1)
        yield from self.end_call()
        yield from self.skip_blanks()
        yield from self.read_over(self.closing)


class Gemma4Parser(FunctionGemmaParser):
    """Keys may have quotes too."""

    name = "gemma4"
    hints: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    opening: ClassVar[str] = "<|tool_call>"
    closing: ClassVar[str] = "<tool_call|>"
    quotes: ClassVar[tuple[str, ...]] = ('<|"|>', '"')
    raw_quotes: ClassVar[tuple[str, ...]] = ('<|"|>',)
    markers: ClassVar[tuple[str, ...]] = (opening, closing, '<|"|>')
