"""The dialect of gpt-oss, OpenAI's Harmony: messages in channels, some of them to functions.

<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>
{"a": 1}<|call|>
<|channel|>final<|message|>It is done.<|return|>

What is said in a channel is content, and the header before it is nothing. The channel of thoughts is the reasoning parser's,
which comes first (reasoning.py); without it they are content too.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from typing import ClassVar

from trunkline.api.tool_parsers.base import CallForm, Malformed, Steps, ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER_CHARACTERS = 512
_HEADER_WORDS = ("assistant", "analysis", "commentary", "final")  # roles and channels
_TO_FUNCTION = "to=functions."


class HarmonyParser(ToolParser):
    """The recipient may stand before or after the channel."""

    name = "openai"
    aliases: ClassVar[tuple[str, ...]] = ("harmony", "gpt-oss", "gpt_oss")
    hints: ClassVar[tuple[str, ...]] = ("<|channel|> … to=functions.",)
    form = CallForm(
        begin=f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}",
        end="<|call|>",
        separator=f"{START}assistant",
        trigger=" to=functions.",
        free_tokens=(START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>"),
    )
    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def read(self) -> Steps[None]:
        while (yield from self.content_until(START, CHANNEL, *ENDS)):
            yield from self.attempt(self._header())

    def _header(self) -> Steps[None]:
        assert self._held is not None
        if self._text.startswith(ENDS, self._held):
            self.drop()
            return
        header = yield from self.until(MESSAGE, most=MAX_HEADER_CHARACTERS)
        before, _, _ = header.partition(CONSTRAIN)
        words = before.replace(CHANNEL, " ").split()
        recipient = next((word for word in words if word.startswith(_TO_FUNCTION)), None)
        if not all(word in _HEADER_WORDS or word == recipient for word in words):
            raise Malformed
        if recipient is None:
            self.drop()
            return
        yield from self.call_of(recipient.removeprefix(_TO_FUNCTION))
        yield from self.skip_blanks()
        yield from self.read_over("<|call|>")
