"""The dialect of GLM 4.5 to 4.7: keys and values between marks. Values are typed by the schema alone.

<tool_call>f
<arg_key>place</arg_key>
<arg_value>Ulm</arg_value>
</tool_call>
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import Steps
from trunkline.api.tool_parsers.conversion import ConvertingParser


class GlmParser(ConvertingParser):
    """With or without line feeds between the parts: GLM 4.7 writes none."""

    name = "glm45"
    aliases: ClassVar[tuple[str, ...]] = ("glm47", "glm")
    hints: ClassVar[tuple[str, ...]] = ("<arg_key>",)
    markers: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )

    def read(self) -> Steps[None]:
        while (yield from self.content_until("<tool_call>")):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        yield from self.skip_blanks()
        function = yield from self.word("< \t\r\n")
        yield from self.skip_blanks()
        if not (yield from self.begins_with("<arg_key>")):
            yield from self.expect("</tool_call>")
            yield from self.start_call(function)
            yield from self.end_arguments()
            return
        yield from self.start_call(function)
        while True:
            key = (yield from self.until("</arg_key>")).strip()
            yield from self.skip_blanks()
            yield from self.expect("<arg_value>")
            yield from self.add_key(key)
            yield from self.value_until("</arg_value>", kinds=self.kinds_of(function, key))
            yield from self.skip_blanks()
            if not (yield from self.begins_with("<arg_key>")):
                break
        yield from self.expect("</tool_call>")
        yield from self.end_arguments()
