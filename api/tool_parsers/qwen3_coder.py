"""The dialect of Qwen 3 Coder and Qwen 3.5: XML whose values are typed by the schema alone.

<tool_call>
<function=f>
<parameter=place>
Ulm
</parameter>
</function>
</tool_call>
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import Steps
from trunkline.api.tool_parsers.conversion import ConvertingParser

_FUNCTION, _PARAMETER = "<function=", "<parameter="


class Qwen3CoderParser(ConvertingParser):
    """Also takes functions that no <tool_call> stands before: smaller ones forget it."""

    name = "qwen3_coder"
    aliases: ClassVar[tuple[str, ...]] = ("qwen3_xml",)
    hints: ClassVar[tuple[str, ...]] = (_FUNCTION,)
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def read(self) -> Steps[None]:
        while (yield from self.content_until("<tool_call>", _FUNCTION)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        assert self._held is not None
        if self._text.startswith(_FUNCTION, self._held):
            self.unread()
        yield from self.skip_blanks()
        yield from self.expect(_FUNCTION)
        function = (yield from self.until(">")).strip()
        yield from self.start_call(function)
        yield from self.skip_blanks()
        while (yield from self.begins_with(_PARAMETER)):
            key = (yield from self.until(">")).strip()
            yield from self.begins_with("\n")
            yield from self.add_key(key)
            ends = "\n</parameter>", "</parameter>"
            yield from self.value_until(*ends, kinds=self.kinds_of(function, key))
            yield from self.skip_blanks()
        yield from self.expect("</function>")
        yield from self.end_arguments()
        yield from self.skip_blanks()
        yield from self.read_over("</tool_call>")
