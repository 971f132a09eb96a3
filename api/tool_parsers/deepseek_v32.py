"""The dialect of DeepSeek V3.2, and of V4, which writes "tool_calls" for "function_calls": XML with a bar.

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="place" string="true">Ulm</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import Malformed, Steps
from trunkline.api.tool_parsers.conversion import ONLY_TEXT, ConvertingParser

_BLOCKS = ("function_calls", "tool_calls")
_OPENINGS = tuple(f"<｜DSML｜{block}>" for block in _BLOCKS)
_CLOSINGS = tuple(f"</｜DSML｜{block}>" for block in _BLOCKS)
_INVOKE, _INVOKED = "<｜DSML｜invoke", "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = "<｜DSML｜parameter", "</｜DSML｜parameter>"


class DeepSeekV32Parser(ConvertingParser):
    """The text itself says what is a string: no schema is asked."""

    name = "deepseek_v32"
    aliases: ClassVar[tuple[str, ...]] = ("deepseekv32", "deepseek_v4")
    hints: ClassVar[tuple[str, ...]] = ("｜DSML｜",)
    markers: ClassVar[tuple[str, ...]] = ("｜DSML｜",)

    def read(self) -> Steps[None]:
        while (yield from self.content_until(*_OPENINGS)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        yield from self.skip_blanks()
        if not (yield from self.begins_with(_INVOKE)):
            raise Malformed
        while True:
            yield from self._call()
            yield from self.skip_blanks()
            if not (yield from self.begins_with(_INVOKE)):
                break
        if not (yield from self.read_over(_CLOSINGS[0])) and not (yield from self.read_over(_CLOSINGS[1])):
            self.put_back()

    def _call(self) -> Steps[None]:
        name = yield from self._attribute("name")
        yield from self.expect(">")
        yield from self.start_call(name)
        yield from self.skip_blanks()
        while (yield from self.begins_with(_PARAMETER)):
            key = yield from self._attribute("name")
            yield from self.skip_blanks()
            is_text = (yield from self.peek()) == ">" or (yield from self._attribute("string")) != "false"
            yield from self.expect(">")
            yield from self.add_key(key)
            yield from self.value_until(_PARAMETER_END, kinds=ONLY_TEXT if is_text else None)
            yield from self.skip_blanks()
        yield from self.expect(_INVOKED)
        yield from self.end_arguments()

    def _attribute(self, name: str) -> Steps[str]:
        yield from self.skip_blanks()
        yield from self.expect(f'{name}="')
        return (yield from self.until('"'))
