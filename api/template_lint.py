"""Does a chat template keep the cache? Looked at once, when the server starts.

    findings = lint(template, tokenizer)
    findings.sentence     # "The chat template keeps the cache: each turn of a chat begins with the tokens of the one …"

What the cache holds after a turn is its prompt and the answer, token for token. The next turn finds it if the template,
given that answer as history, writes the same again. Many templates don't, and which part of them breaks it is hard to
see. So a small chat is rendered turn by turn as a client would send it, and compared:

    cached     … <|im_start|> assistant \\n <think> …      turn 1: the prompt, and what the model wrote
    rendered   … <|im_start|> assistant \\n The …          turn 2
                                            ↑ 31 tokens are found; then it is the reasoning, left out of earlier answers

The token that ends an answer isn't compared. It is the last one, its KV was never computed, so nothing is lost there.
Knows no engine and no HTTP.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from trunkline.api.prompt import encode_within
from trunkline.api.template import ChatTemplate
from trunkline.errors import TrunklineError
from trunkline.models.tokenizer import Tokenizer

PAGE = "docs/cache.md, 'Does your template keep the cache?'"
SHOWN_TOKENS = 5  # on either side of a difference

SYSTEM = "You answer questions about the weather."
QUESTIONS = ("Why is the sky blue?", "And why is it red in the evening?", "Does that mean rain?")
ANSWERS = ("The air scatters blue light most.", "The light comes a longer way.")
REASONING = "The user wants a short answer."
TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "Tomorrow's weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
NOON = datetime(2026, 1, 14, 12, 0, 0)
DAY = timedelta(days=1)

_ANSWER_AGAIN = "Every turn reads the last answer again."
_CHAT_AGAIN = "Every turn reads the chat again from there on."


class Part(enum.Enum):
    """What of a template breaks the cache, and what that costs."""

    TIME = ("the time, which is another in every prompt", "Every request reads all that follows it again.")
    SYSTEM = ("the system message, which moves on with the last message", _CHAT_AGAIN)
    BEGINNING = ("what it writes before the first message", _CHAT_AGAIN)
    MESSAGES = ("earlier messages, which it writes differently once others follow", _CHAT_AGAIN)
    TOOLS = ("the tools, which move on with the last message", _CHAT_AGAIN)
    AFTER_LAST = ("what it writes behind the last message, which is gone once others follow", _CHAT_AGAIN)
    GENERATION_PROMPT = (
        "the generation prompt, which is another than the beginning of an earlier answer",
        _ANSWER_AGAIN,
    )
    BORDER = ("the border of generation prompt and answer: other tokens, once it is read as one text", _ANSWER_AGAIN)
    REASONING = ("the reasoning, which it leaves out of earlier answers", _ANSWER_AGAIN)
    ANSWER = ("the answer, which it writes with other blanks than the model did", _ANSWER_AGAIN)
    END = ("the end of the answer, which becomes one token with what follows", "Every turn reads the last token again.")

    def __init__(self, words: str, cost: str) -> None:
        self.words = words
        self.cost = cost


class Case(NamedTuple):
    """A kind of chat to look at; `words` completes "breaks the cache …"."""

    words: str
    has_system: bool = True
    has_tools: bool = False
    reasons: bool = False


class Break(NamedTuple):
    """Where the next turn stops to repeat what is cached.

    num_found   tokens that are found,
    num_cached  of so many
    cached      what the cache goes on with, as text; if the text is the same, with | between the tokens
    rendered    what the template writes there
    """

    part: Part
    case: Case
    num_found: int
    num_cached: int
    cached: str
    rendered: str


class Findings(NamedTuple):
    """What the lint has to say.

    breaks    none: each turn extends the one before it
    has_date  the prompt holds the date, and is another every day
    unseen    why nothing could be looked at; "" if something was
    """

    breaks: list[Break]
    has_date: bool
    unseen: str = ""

    @property
    def is_costly(self) -> bool:
        """True if turns lose more than a token."""
        return any(found.part is not Part.END for found in self.breaks)

    @property
    def sentence(self) -> str:
        """For the log, in one line."""
        if self.unseen:
            return f"Whether the chat template keeps the cache can't be told: {self.unseen}"
        date = " It holds the date: at midnight every prompt becomes a new one." if self.has_date else ""
        if not self.breaks:
            kept = "each turn of a chat begins with the tokens of the one before"
            return f"The chat template keeps the cache: {kept}.{date}"
        first, *others = self.breaks
        more = "".join(f" And {other.case.words or 'also'}: {other.part.words}." for other in others)
        return (
            f"The chat template breaks the cache{first.case.words and ' ' + first.case.words}: {first.part.words}."
            f" Of {first.num_cached} tokens of a turn the next finds {first.num_found}; then it has {first.rendered!r}"
            f" where {first.cached!r} is cached. {first.part.cost}{more}{date} See {PAGE}."
        )


def lint(template: ChatTemplate, tokenizer: Tokenizer) -> Findings:
    """Look at a template, some milliseconds. Raises nothing over what the template does."""
    return _Lint(template.source, tokenizer).findings()


class _Lint:
    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._now = NOON
        self._source = source
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, special_tokens=tokenizer.special_tokens, now=lambda: self._now)

    def findings(self) -> Findings:
        breaks: dict[Part, Break] = {}
        has_date = False
        refusals = []
        cases = list(self._cases())
        for case in cases:
            try:
                for found in (*self._times(case), *self._turns(case)):
                    breaks.setdefault(found.part, found)
                has_date = has_date or self._changes(case, DAY) is not None
            except TrunklineError as error:  # it takes no system message, say
                refusals.append(str(error))
        if len(refusals) == len(cases):
            return Findings([], False, refusals[0])
        return Findings(list(breaks.values()), has_date and Part.TIME not in breaks)

    def _cases(self) -> Iterator[Case]:
        yield Case("")
        yield Case("without a system message", has_system=False)
        if "tools" in self._source:
            yield Case("with tools", has_tools=True)
        if "</think>" in self._source:
            yield Case("of reasoning models", reasons=True)

    # ---- turn after turn

    def _turns(self, case: Case) -> Iterator[Break]:
        messages = _first_turn(case)
        for answer, question in zip(ANSWERS, QUESTIONS[1:], strict=True):
            prompt = self._text(messages, case)
            thinks = prompt.rstrip().endswith("<think>")
            if thinks and not case.reasons:
                return  # the model will reason, whatever the case says
            written = self._written(answer, thinks=thinks, case=case)
            following = [*messages, {"role": "assistant", "content": written}, {"role": "user", "content": question}]
            if found := self._compare(messages, prompt, written, self._text(following, case), case):
                yield found
            messages = following

    def _written(self, answer: str, *, thinks: bool, case: Case) -> str:
        """What a model writes: its reasoning too, and a space first where its tokenizer knows words by one."""
        if case.reasons:
            return ("" if thinks else "<think>\n") + f"{REASONING}\n</think>\n\n{answer}"
        return " " + answer if self._tokenizer.strips_leading_space else answer

    def _compare(
        self, messages: Sequence[Mapping[str, str]], prompt: str, written: str, following: str, case: Case
    ) -> Break | None:
        prompt_ids = self._encode(prompt)
        cached, rendered = prompt_ids + encode_within(self._tokenizer, written), self._encode(following)
        at = _num_common(cached, rendered)
        if at == len(cached):
            return None
        if case.reasons and REASONING not in following:
            part = Part.REASONING
        elif case.has_system and following.find(SYSTEM) > following.find(QUESTIONS[0]):
            part = Part.SYSTEM
        elif self._bytes(rendered[at:]).startswith(self._bytes(cached[at:])):
            part = Part.END if at == len(cached) - 1 else Part.BORDER
        elif at >= len(prompt_ids):
            part = Part.ANSWER
        else:
            part = self._part_of_prompt(messages, prompt, prompt_ids, at, case)
        return self._break(part, case, cached, rendered, at)

    def _part_of_prompt(
        self, messages: Sequence[Mapping[str, str]], prompt: str, prompt_ids: list[int], at: int, case: Case
    ) -> Part:
        without = self._text(messages, case, add_generation_prompt=False)
        if at >= _num_common(prompt_ids, self._encode(without)):
            return Part.GENERATION_PROMPT
        if (
            case.has_tools
            and _num_common(prompt_ids, self._encode(self._text(messages, case._replace(has_tools=False)))) <= at
        ):
            return Part.TOOLS
        num_characters = len(self._tokenizer.decode(prompt_ids[:at], skip_special_tokens=False))
        if num_characters < prompt.find(messages[0]["content"]):
            return Part.BEGINNING
        if num_characters >= prompt.rfind(messages[-1]["content"]) + len(messages[-1]["content"]):
            return Part.AFTER_LAST
        return Part.MESSAGES

    # ---- as time goes by

    def _times(self, case: Case) -> Iterator[Break]:
        """The time of day. A date is no break: it changes once a day."""
        found = (self._changes(case, step) for step in (timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)))
        yield from itertools.islice(filter(None, found), 1)

    def _changes(self, case: Case, step: timedelta) -> Break | None:
        """Where the same chat gives another prompt a while later."""
        if "strftime_now" not in self._source:
            return None
        cached = self._encode(self._text(_first_turn(case), case))
        rendered = self._encode(self._text(_first_turn(case), case, after=step))
        at = _num_common(cached, rendered)
        return None if cached == rendered else self._break(Part.TIME, case, cached, rendered, at)

    # ---- small things

    def _text(
        self,
        messages: Sequence[Mapping[str, str]],
        case: Case,
        *,
        add_generation_prompt: bool = True,
        after: timedelta = timedelta(0),
    ) -> str:
        self._now = NOON + after
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=[TOOL] if case.has_tools else None
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _break(self, part: Part, case: Case, cached: list[int], rendered: list[int], at: int) -> Break:
        between = b"|" if part in (Part.BORDER, Part.END) else b""
        texts = (self._bytes(ids[at : at + SHOWN_TOKENS], between) for ids in (cached, rendered))
        return Break(part, case, at, len(cached), *(text.decode("utf-8", "backslashreplace") for text in texts))

    def _bytes(self, token_ids: Sequence[int], between: bytes = b"") -> bytes:
        return between.join(map(self._tokenizer.token_bytes, token_ids))


def _first_turn(case: Case) -> list[dict[str, str]]:
    system = [{"role": "system", "content": SYSTEM}] if case.has_system else []
    return [*system, {"role": "user", "content": QUESTIONS[0]}]


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
