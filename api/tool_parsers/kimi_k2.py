"""The dialect of Kimi K2. Its calls have ids of their own, which it wants to see again: the function's name, and a number.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import CallForm, Steps, ToolParser

_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2Parser(ToolParser):
    """Keeps the ids that the model wrote, unless it wrote one twice."""

    name = "kimi_k2"
    hints: ClassVar[tuple[str, ...]] = (_SECTION_BEGIN,)
    form = CallForm(
        opening=_SECTION_BEGIN,
        begin=f"{_CALL_BEGIN}functions.{{name}}:0{_ARGUMENTS}",
        end=_CALL_END,
        separator="",
        closing=_SECTION_END,
        trigger=_SECTION_BEGIN,
    )
    markers: ClassVar[tuple[str, ...]] = (_SECTION_BEGIN, _CALL_BEGIN, _ARGUMENTS, _CALL_END, _SECTION_END)

    def read(self) -> Steps[None]:
        while (yield from self.content_until(_SECTION_BEGIN)):
            section = self.section(self._call, begin=_CALL_BEGIN, end=_CALL_END, closing=_SECTION_END)
            yield from self.attempt(section)

    def _call(self) -> Steps[None]:
        name, number = _parts((yield from self.until(_ARGUMENTS)))
        while (call_id := f"functions.{name}:{number}") in self.ids:
            number += 1
        yield from self.call_of(name, call_id)


def _parts(call_id: str) -> tuple[str, int]:
    """Name and number. Models that lost precision leave out either side of the name."""
    name = call_id.strip().removeprefix("functions.")
    before, colon, number = name.rpartition(":")
    if colon and number.isascii() and number.isdecimal() and len(number) < 10:
        return before, int(number)
    return name, 0
