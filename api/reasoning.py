"""What a reasoning model thinks before it answers, cut off from its text as that arrives. Knows no HTTP and no tokens.

    thinking = DeepSeekR1Parser.expect(prompt, asked=None)      # None: nothing will be thought
    parser = thinking.parser(is_open=thinking.is_open)          # the text may begin inside of the thoughts
    parser.push("Hm. </th")                      # Split(reasoning="Hm.", text=""): "</th" may become "</think>", and is held back
    parser.push("ink>\\n\\nYes.")                  # Split(reasoning="", text="Yes.")
    parser.finish()                              # Split(reasoning="", text="")

A family of models is one class here, found by its name. Blanks at the ends of the thoughts, and before the answer, are layout.
gpt-oss, which thinks in a channel, has a class in harmony_reasoning.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from trunkline.api.marks import first_in, overlap

SWITCHES = ("enable_thinking", "thinking")  # of `chat_template_kwargs`, in the templates of different models


class Split(NamedTuple):
    """What a piece of text added."""

    reasoning: str
    text: str


class Thinking(NamedTuple):
    """What is to be expected of one answer.

    parser      reads its thoughts
    is_open     the text may begin inside of them, without a mark
    is_awaited  there will be thoughts: what the text must follow, it follows behind them
    """

    parser: type["ReasoningParser"]
    is_open: bool = False
    is_awaited: bool = True


class ReasoningParser:
    """Thoughts between two marks, before everything else.

    name           as --reasoning-parser calls it
    aliases        as other servers call it
    open           the mark before the thoughts
    close          the mark behind them: what a text must follow, it follows from there on
    other_closes   marks that end the thoughts too, and belong to the answer
    begins_inside  the mark before the thoughts may be missing, whatever the prompt ends with
    is_default     the model thinks unless it is told not to; otherwise only if it is told to
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    open: ClassVar[str] = "<think>"
    close: ClassVar[str] = "</think>"
    other_closes: ClassVar[tuple[str, ...]] = ()
    begins_inside: ClassVar[bool] = False
    is_default: ClassVar[bool] = True

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open
        self._read = self._before
        self._held = ""
        self._is_over = False
        self.has_closed = False  # the mark behind the thoughts was read

    @classmethod
    def expect(cls, prompt: str, asked: bool | None) -> Thinking | None:
        """What is to be expected; None: no thoughts, all text is the answer.

        prompt  as it was rendered. If it ends with the first mark, the text begins inside; with the second, they are over
        asked   what the request says: True to think, False not to
        """
        prompt = prompt.rstrip()
        if asked is False or prompt.endswith(cls.close):
            return None
        is_opened = prompt.endswith(cls.open)
        return Thinking(cls, is_opened or cls.begins_inside, is_opened or asked is True or cls.is_default)

    @classmethod
    def close_before(cls, *, calls: bool) -> str:
        """The mark after which a text begins to follow its grammar, of tool calls or of anything else."""
        return cls.close

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Texts that it looks for: they must be shown to it even if they are special tokens."""
        return (cls.open, cls.close, *cls.other_closes)

    @classmethod
    def ends(cls) -> tuple[str, ...]:
        """Texts with the first of which the thoughts are over."""
        return (cls.close, *cls.other_closes)

    def push(self, text: str) -> Split:
        """More text."""
        self._held += text
        reasoning, answer = "", ""
        while True:
            before = self._read, len(self._held)
            thought, said = self._read()
            reasoning, answer = reasoning + thought, answer + said
            if (self._read, len(self._held)) == before:
                return Split(reasoning, answer)

    def finish(self) -> Split:
        """No more text comes: what was held back."""
        self._is_over = True
        return self.push("")

    # Each reads what is certain of `_held`, and says who reads on.

    def _before(self) -> Split:
        start = self._held.lstrip()
        if start.startswith(self.open):
            self._held = start.removeprefix(self.open)
            self._read = self._thoughts_begin
        elif self._is_over or not self.open.startswith(start):
            self._read = self._thoughts_begin if self._is_open else self._answer
        return Split("", "")

    def _thoughts_begin(self) -> Split:
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._thoughts
        return Split("", "")

    def _thoughts(self) -> Split:
        found, mark = first_in(self._held, self.ends())
        if mark:
            thoughts, rest = self._held[:found], self._held[found:]
            self.has_closed = True
            is_answer = mark in self.other_closes
            self._held, self._read = rest if is_answer else rest.removeprefix(mark), self._answer_begins
            return Split(thoughts.rstrip(), "")
        certain = len(self._held) if self._is_over else len(self._held) - overlap(self._held, self.ends())
        certain = len(self._held[:certain].rstrip())
        thoughts, self._held = self._held[:certain], "" if self._is_over else self._held[certain:]
        return Split(thoughts, "")

    def _answer_begins(self) -> Split:
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._answer
        return Split("", "")

    def _answer(self) -> Split:
        said, self._held = self._held, ""
        return Split("", said)


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 and those distilled from it: some templates begin the thoughts, some models forget to."""

    name = "deepseek_r1"
    aliases = ("deepseek-r1",)
    begins_inside = True


class DeepSeekV3Parser(ReasoningParser):
    """DeepSeek V3.1 and later: they think if their template was told to."""

    name = "deepseek_v3"
    aliases = ("deepseek-v3", "deepseek_v4")
    is_default = False


class Qwen3Parser(ReasoningParser):
    """Qwen 3, SmolLM3 and others that can be told not to think."""

    name = "qwen3"


class Glm45Parser(ReasoningParser):
    """GLM 4.5 to 4.7."""

    name = "glm45"
    aliases = ("glm47",)


class KimiK2Parser(ReasoningParser):
    """Kimi K2 Thinking and K2.5, which may begin to call without an end of their thoughts."""

    name = "kimi_k2"
    aliases = ("kimi",)
    begins_inside = True
    other_closes = ("<|tool_calls_section_begin|>",)


class MistralParser(ReasoningParser):
    """Magistral, and Mistral's models since that can think."""

    name = "mistral"
    aliases = ("magistral",)
    open = "[THINK]"
    close = "[/THINK]"


class GraniteParser(ReasoningParser):
    """Granite 3.2, whose marks are words: {"thinking": true}."""

    name = "granite"
    open = "Here is my thought process:"
    close = "Here is my response:"
    is_default = False


class Gemma4Parser(ReasoningParser):
    """Gemma 4, which thinks in a channel of its own: {"enable_thinking": true}."""

    name = "gemma4"
    open = "<|channel>thought"
    close = "<channel|>"
    is_default = False


def asked_to_think(variables: Mapping[str, Any] | None) -> bool | None:
    """What the `chat_template_kwargs` of a request say; None: nothing."""
    for switch in SWITCHES:
        if isinstance(wish := (variables or {}).get(switch), bool):
            return wish
    return None
