"""DeepSeek's dialects of JSON: that of V3 and R1, and that of V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import CallForm, Steps, ToolParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV31Parser(ToolParser):
    """Also takes calls that nothing opens or closes together."""

    name = "deepseek_v31"
    aliases: ClassVar[tuple[str, ...]] = ("deepseekv31",)
    hints: ClassVar[tuple[str, ...]] = (SEPARATOR,)
    form = CallForm(
        opening=CALLS_BEGIN,
        begin=f"{CALL_BEGIN}{{name}}{SEPARATOR}",
        end=CALL_END,
        separator="",
        closing=CALLS_END,
        trigger=CALLS_BEGIN,
    )
    markers: ClassVar[tuple[str, ...]] = (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)

    def read(self) -> Steps[None]:
        while (yield from self.content_until(CALLS_BEGIN, CALL_BEGIN)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[None]:
        assert self._held is not None
        if self._text.startswith(CALL_BEGIN, self._held):
            self.unread()
        yield from self.section(self.call, begin=CALL_BEGIN, end=CALL_END, closing=CALLS_END)

    def call(self) -> Steps[None]:
        """What stands between the marks of one."""
        yield from self.call_of((yield from self.until(SEPARATOR)))


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Reads arguments with and without a fence around them."""

    name = "deepseek_v3"
    aliases: ClassVar[tuple[str, ...]] = ("deepseekv3",)
    hints: ClassVar[tuple[str, ...]] = (f"{SEPARATOR} … ```json",)
    form = CallForm(
        opening=CALLS_BEGIN,
        begin=f"{CALL_BEGIN}function{SEPARATOR}{{name}}\n```json\n",
        end=f"\n```{CALL_END}",
        separator="\n",
        closing=CALLS_END,
        trigger=CALLS_BEGIN,
    )

    def call(self) -> Steps[None]:
        yield from self.until(SEPARATOR)  # "function": there is no other type of tools
        name = yield from self.until("\n")
        yield from self.skip_blanks()
        is_fenced = yield from self.begins_with("```json")
        yield from self.call_of(name)
        if is_fenced:
            yield from self.skip_blanks()
            yield from self.read_over("```")
