"""The thoughts of gpt-oss: what it says in the channel "analysis", at any time. See tool_parsers/harmony.py for its texts.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
                                  thought                                            said

A message to a function is handed on with its header, for the parser of its calls. Other headers are nothing.
"""

from trunkline.api.marks import first_in, overlap
from trunkline.api.reasoning import ReasoningParser, Split, Thinking
from trunkline.api.tool_parsers.harmony import CHANNEL, ENDS, MAX_HEADER_CHARACTERS, MESSAGE, START, HarmonyParser

_BEGINS = (START, CHANNEL)


class HarmonyReasoningParser(ReasoningParser):
    """It can't be told not to think, only how much."""

    name = "openai_gptoss"
    aliases = ("gpt-oss", "gpt_oss", "harmony")
    open = CHANNEL
    close = f"{CHANNEL}final{MESSAGE}"

    def __init__(self, *, is_open: bool = False) -> None:
        super().__init__(is_open=is_open)
        self._read = self._said
        self._has_thought = False
        self._separator = ""  # before a message of thoughts that follows another

    @classmethod
    def expect(cls, prompt: str, asked: bool | None) -> Thinking | None:
        return Thinking(cls)

    @classmethod
    def close_before(cls, *, calls: bool) -> str:
        return f"{START}assistant" if calls else cls.close

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return HarmonyParser.markers

    def _said(self) -> Split:
        return Split("", self._until_mark())

    def _thought(self) -> Split:
        if not (thought := self._until_mark()):
            return Split("", "")
        thought, self._separator, self._has_thought = self._separator + thought, "", True
        return Split(thought, "")

    def _until_mark(self) -> str:
        """The text before the next mark; on with what follows that."""
        found, mark = first_in(self._held, (*_BEGINS, *ENDS))
        if not mark and not self._is_over:
            found -= overlap(self._held, (*_BEGINS, *ENDS))
        text, self._held = self._held[:found], self._held[found:]
        if mark in ENDS:
            self._held = self._held.removeprefix(mark)
            self._read = self._said
        elif mark:
            self._read = self._header
        return text

    def _header(self) -> Split:
        found, mark = first_in(self._held, (MESSAGE,))
        if found > MAX_HEADER_CHARACTERS:
            header, self._held, self._read = self._held[:found], self._held[found:], self._said
            return Split("", header)
        if not mark:
            if self._is_over:  # of a message that was never begun
                self._held, self._read = "", self._said
            return Split("", "")
        header, self._held = self._held[:found], self._held[found:]
        if " to=" in header:
            self.has_closed = True
            self._read = self._call
            return Split("", header)
        self._held = self._held.removeprefix(MESSAGE)
        self._read = self._said
        self.has_closed = True
        if f"{CHANNEL}analysis" in header:
            self._read = self._thought
            self._separator = "\n" if self._has_thought else ""
        return Split("", "")

    def _call(self) -> Split:
        """A message to a function, its end included."""
        found, mark = first_in(self._held, (START, *ENDS))
        if mark:
            found += len(mark) if mark in ENDS else 0
            self._read = self._said
        elif not self._is_over:
            found -= overlap(self._held, (START, *ENDS))
        text, self._held = self._held[:found], self._held[found:]
        return Split("", text)
