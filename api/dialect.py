"""How a served model writes calls and thoughts, and what that makes of a request: its constraint, and who reads its answer.

    dialect = Dialect.of(template, tokenizer, tool_call_parser="auto", reasoning_parser="none")    # once
    plan = dialect.plan(use, response=…, prompt="<|im_start|>…", options={…})                      # for each request
    plan.constraint           # what its text must follow
    plan.reader()             # an AnswerReader, for each choice

Knows no HTTP and no engine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from trunkline.api.answer_reader import AnswerReader
from trunkline.api.constrained import Call, Checks
from trunkline.api.generation import OutputProcessor
from trunkline.api.reasoning import ReasoningParser, Thinking
from trunkline.api.reasoning_parsers import find_reasoning_parser
from trunkline.api.template import ChatTemplate
from trunkline.api.tool_parsers import choose_dialect, find_dialect
from trunkline.api.tool_parsers.base import ToolParser
from trunkline.api.tool_parsers.json_calls import GenericParser
from trunkline.api.tools import ToolUse
from trunkline.constraint import Constraint, Tag
from trunkline.errors import InvalidParameter
from trunkline.grammar.interface import GrammarRefused
from trunkline.models.tokenizer import Tokenizer
from trunkline.outputs import ToolCall


class Plan(NamedTuple):
    """What is done with one request.

    constraint      None: its text is free
    thinking        what it thinks is cut off; None: nothing is
    shows_thoughts  or left out
    shown_ids       special tokens that are text nevertheless, since a parser looks for them
    """

    constraint: Constraint | None = None
    use: ToolUse | None = None
    tools: type[ToolParser] | None = None
    thinking: Thinking | None = None
    shown_ids: frozenset[int] = frozenset()
    shows_thoughts: bool = True

    def reader(self) -> AnswerReader:
        """For one choice."""
        reasoning = None if self.thinking is None else self.thinking.parser(is_open=self.thinking.is_open)
        if self.use is None or self.tools is None:
            return AnswerReader(None, reasoning, shows_thoughts=self.shows_thoughts)
        return AnswerReader(
            self.tools(self.use.names),
            reasoning,
            shows_thoughts=self.shows_thoughts,
            only_calls=self.use.is_forced,
            at_most=self.use.at_most,
            is_named=self.use.mode == "named",
        )

    def read(self, choice: OutputProcessor) -> AnswerReader:
        """A reader that has read the whole text of a choice that has ended."""
        reader = self.reader()
        reader.push(choice.text)
        reader.finish(choice.finish_reason)
        return reader

    def reasoning_tokens(self, choice: OutputProcessor, reader: AnswerReader) -> int | None:
        """Of a choice that was read: those up to the end of its thoughts. None: there can't be any."""
        if self.thinking is None:
            return None
        return choice.num_tokens_until(self.thinking.parser.ends()) if reader.has_thought else 0

    def checked_calls(self, reader: AnswerReader) -> list[Call]:
        """Those that were read, with the place of the schema that each is compared with."""
        if self.constraint is not None and self.constraint.after and not reader.has_closed:
            return []  # the model did not think, and so nothing was enforced
        places = {} if self.use is None else {tool.name: tool.where for tool in self.use.tools}
        return [Call(places[call.name], call.arguments) for call in reader.calls if call.name in places]


class Dialect(NamedTuple):
    """Of one model.

    tools            reads its calls
    reasoning        reads its thoughts; None: it has none, or they are left in the text
    shown_ids        ids of the markers of both that are special tokens
    special_tokens   the markers of calls that are special tokens
    sentence         for the log
    """

    tools: type[ToolParser]
    reasoning: type[ReasoningParser] | None
    shown_ids: frozenset[int]
    special_tokens: tuple[str, ...]
    sentence: str

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "none",
    ) -> "Dialect":
        """Raises ConfigError for names that there are not."""
        knows_tools = template is not None and template.knows_tools
        source = template.source if template is not None else ""
        choice = choose_dialect(tool_call_parser, source, has_tools_branch=knows_tools)
        reasoning = find_reasoning_parser(reasoning_parser)
        markers = {*choice.dialect.markers, *(reasoning.markers() if reasoning is not None else ())}
        sentence = f"Tool calls are read as those of {choice.dialect.name}: {choice.reason}."
        if template is not None and not knows_tools:
            sentence = f"The model's chat template has no tools branch: tools are told in a built-in prompt. {sentence}"
        if reasoning is not None:
            sentence += f" Thoughts are read as those of {reasoning.name}: --reasoning-parser says so."
        return cls(
            choice.dialect,
            reasoning,
            frozenset().union(*(_special_ids(tokenizer, marker) for marker in markers)),
            tuple(filter(tokenizer.is_special, choice.dialect.markers)),
            sentence,
        )

    def plan(
        self,
        use: ToolUse | None,
        *,
        response: Constraint | None,
        prompt: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        asked_to_think: bool | None = None,
        shows_thoughts: bool = True,
    ) -> Plan:
        """What is done with a request.

        use             what it may call
        response        what its text must follow
        prompt          as it was rendered
        options         how: fields of the Constraint for the calls
        asked_to_think  what the request says; None: nothing
        shows_thoughts  False: they are left out of the answer

        Raises InvalidParameter if both can't be had, GrammarRefused for a strict tool that can't be enforced.
        """
        thinking = None if self.reasoning is None else self.reasoning.expect(prompt, asked_to_think)
        tools, constraint = None, response
        if use is not None:
            tools = self._parser(use, response)
            constraint = self._constraint(use, tools, response, options)
        if constraint is not None and thinking is not None and thinking.is_awaited:
            mark = thinking.parser.close_before(calls=constraint.tags is not None)
            constraint = msgspec.structs.replace(constraint, after=mark)
            # Where something is promised, text that nothing was enforced in doesn't pass for an answer.
            thinking = thinking._replace(is_open=thinking.is_open or _promises(constraint))
        is_read = tools is not None or thinking is not None
        shown_ids = self.shown_ids if is_read else frozenset()
        return Plan(constraint, use, tools, thinking, shown_ids, shows_thoughts)

    def _parser(self, use: ToolUse, response: Constraint | None) -> type[ToolParser]:
        is_written = use.is_forced or response is not None  # by a grammar, in a form that it can write
        return GenericParser if is_written and self.tools.form is None else self.tools

    def _constraint(
        self, use: ToolUse, tools: type[ToolParser], response: Constraint | None, options: Mapping[str, Any]
    ) -> Constraint | None:
        if tools.form is not None:
            # Calls that must be made leave no text that a response_format could be about.
            instead = None if use.is_forced or response is None else _as_tag(response)
            tags = use.tags(tools.form, instead=instead, special_tokens=self.special_tokens)
            return Constraint(tags=tags, where="tools", **options)
        for tool in use.tools:
            if tool.strict:
                raise GrammarRefused(
                    f"'{tool.where}' is strict, but calls of the dialect {self.tools.name} can only be enforced if calls must be"
                    " made: set 'tool_choice' to \"required\" or a function, or 'strict' to false.",
                    param=tool.where,
                )
        return None


class Found(NamedTuple):
    """What an ended text was found to be, for callers in Python: see CompletionOutput."""

    valid: bool | None = None
    tool_calls: tuple[ToolCall, ...] = ()


def look_at(choice: OutputProcessor, plan: Plan, checks: Checks | None) -> Found:
    """Read the calls of a choice that has ended, and compare it with what it was to follow."""
    reader = plan.read(choice)
    calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reader.calls)
    if checks is None:
        return Found(None, calls)
    return Found(checks.verdict(choice, text=reader.content, calls=plan.checked_calls(reader)).valid, calls)


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for names that there are not: before a model is loaded."""
    if tool_call_parser != "auto":
        find_dialect(tool_call_parser)
    find_reasoning_parser(reasoning_parser)


def _promises(constraint: Constraint) -> bool:
    """Whether an answer follows it in any case: not if it is about calls that nobody must make, and that are not strict."""
    tags = constraint.tags
    return tags is None or tags.forced or any(tag.strict for tag in tags.tags)


def _as_tag(response: Constraint) -> Tag:
    if response.kind not in ("json_schema", "json_object"):
        raise InvalidParameter(
            f"'{response.where}' can't be followed by an answer that may call tools as well, unless it is JSON. Set 'tool_choice' to"
            ' "none", or leave one of them out.',
            param=response.where,
        )
    return Tag(
        begin="",
        json_schema='{"type": "object"}' if response.kind == "json_object" else response.json_schema,
        end="",
        where=response.where,
        name=response.name,
        strict=response.strict,
    )


def _special_ids(tokenizer: Tokenizer, marker: str) -> frozenset[int]:
    """The special token that the marker is, or those that it has at its ends."""
    return frozenset(tokenizer.encode(marker, add_special_tokens=False)) & tokenizer.special_ids
