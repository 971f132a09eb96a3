"""Thoughts: the families of models in every split, what is expected of whom, what it costs, and all of it through a server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.serving import Server
from tests.api.test_chat import chunks, raw
from tests.api.test_chat_answer import Case, put_together
from tests.api.test_tools import added_up, dialect_of, tool, use_of
from trunkline.api.answer_reader import AnswerReader
from trunkline.api.reasoning import ReasoningParser, asked_to_think
from trunkline.api.reasoning_parsers import REASONING_PARSERS, find_reasoning_parser
from trunkline.api.tool_parsers.harmony import HarmonyParser
from trunkline.constraint import Constraint
from trunkline.errors import ConfigError
from trunkline.models.tokenizer import Tokenizer


def parser_of(name: str) -> type[ReasoningParser]:
    parser = find_reasoning_parser(name)
    assert parser is not None
    return parser


def split(parser: type[ReasoningParser], *pieces: str, is_open: bool = False) -> tuple[str, str]:
    reader = parser(is_open=is_open)
    parts = [reader.push(piece) for piece in pieces] + [reader.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


def split_everywhere(parser: type[ReasoningParser], text: str, *, is_open: bool = False) -> tuple[str, str]:
    whole = split(parser, text, is_open=is_open)
    for at in range(len(text) + 1):
        assert split(parser, text[:at], text[at:], is_open=is_open) == whole, (text[:at], text[at:])
    assert split(parser, *text, is_open=is_open) == whole
    return whole


@pytest.mark.parametrize(
    ("name", "is_open", "text", "thoughts", "answer"),
    [
        ("deepseek_r1", True, "Hm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("deepseek_r1", True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", True, "Hm, </thin", "Hm, </thin", ""),
        ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("qwen3", False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("qwen3", False, "Yes, <think>no</think>.", "", "Yes, <think>no</think>."),
        ("qwen3", False, " <thi", "", " <thi"),
        ("qwen3", True, "Hm. </think> a </think> b", "Hm.", "a </think> b"),
        ("glm45", False, "\n<think>Hm.</think>\nYes.", "Hm.", "Yes."),
        ("deepseek_v3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
        ("kimi_k2", True, "Hm.</think>Yes.", "Hm.", "Yes."),
        ("kimi_k2", True, "Hm. <|tool_calls_section_begin|>f", "Hm.", "<|tool_calls_section_begin|>f"),
        ("mistral", False, "[THINK]Hm. [1][/THINK]Yes.", "Hm. [1]", "Yes."),
        ("mistral", False, "Yes. [/THINK]", "", "Yes. [/THINK]"),
        ("granite", False, "Here is my thought process: Hm.\n\nHere is my response: Yes.", "Hm.", "Yes."),
        ("granite", False, "Here is my recipe", "", "Here is my recipe"),
        ("gemma4", False, "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
        ("openai_gptoss", False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes."),
        ("openai_gptoss", False, "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>", "A\nB", ""),
        ("openai_gptoss", False, "<|channel|>final<|message|>Yes.", "", "Yes."),
        ("openai_gptoss", False, "<|channel|>analysis<|message|>Hm. <", "Hm. <", ""),
        ("openai_gptoss", False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", "Hm.", ""),
        ("openai_gptoss", False, "Plain <b>text</b>", "", "Plain <b>text</b>"),
        ("openai_gptoss", False, "<|channel|>" + "x" * 600 + "<|message|>y", "", "<|channel|>" + "x" * 600 + "<|message|>y"),
    ],
)  # fmt: skip
def test_texts(name: str, is_open: bool, text: str, thoughts: str, answer: str) -> None:
    assert split_everywhere(parser_of(name), text, is_open=is_open) == (thoughts, answer)


PIECES = ["<think>", "</think>", "[THINK]", "[/THINK]", "<", "</", "[", " ", "\n", "a", "Here is my response:", "Here is", "<|channel|>analysis<|message|>", "<|channel|>", "<|end|>", "<|message|>", "<|start|>assistant", "<channel|>", " to=functions.f "]  # fmt: skip


@given(st.sampled_from(REASONING_PARSERS), st.booleans(), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_text_reads_the_same_in_pieces(parser: type[ReasoningParser], is_open: bool, text: str) -> None:
    thoughts, answer = split_everywhere(parser, text, is_open=is_open)
    if not any(mark in text for mark in parser.markers()) and not is_open:
        assert (thoughts, answer) == ("", text)


def test_names_are_those_of_other_servers_too() -> None:
    assert find_reasoning_parser("none") is None
    for parser in REASONING_PARSERS:
        assert all(find_reasoning_parser(name) is parser for name in (parser.name, *parser.aliases))
    with pytest.raises(ConfigError, match="allowed is one of none, deepseek_r1, "):
        find_reasoning_parser("gpt")


# ── what is expected ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "prompt", "asked", "expected"),
    [
        # (the text may begin inside, what it must follow waits); None: nothing is read
        ("deepseek_r1", "assistant", None, (True, True)),
        ("deepseek_r1", "assistant<think>\n", None, (True, True)),
        ("qwen3", "assistant\n", None, (False, True)),
        ("qwen3", "assistant\n<think>\n", None, (True, True)),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None, None),
        ("qwen3", "assistant\n", False, None),
        ("deepseek_v3", "assistant</think>", None, None),
        ("deepseek_v3", "assistant<think>", None, (True, True)),
        ("deepseek_v3", "assistant", None, (False, False)),
        ("granite", "assistant", None, (False, False)),
        ("granite", "assistant", True, (False, True)),
        ("gemma4", "assistant", True, (False, True)),
        ("mistral", "[/INST]", None, (False, True)),
        ("kimi_k2", "<think></think>", None, None),
        ("openai_gptoss", "<|start|>assistant", False, (False, True)),
    ],
)
def test_expectations(name: str, prompt: str, asked: bool | None, expected: tuple[bool, bool] | None) -> None:
    thinking = parser_of(name).expect(prompt, asked)
    assert (None if thinking is None else (thinking.is_open, thinking.is_awaited)) == expected


def test_what_requests_say() -> None:
    assert asked_to_think(None) is None
    assert asked_to_think({"thinking": True}) is True
    assert asked_to_think({"enable_thinking": False, "thinking": True}) is False
    assert asked_to_think({"enable_thinking": "no"}) is None


def test_constraints_wait_only_for_thoughts_that_will_come(tokenizer: Tokenizer) -> None:
    def after(name: str, prompt: str = "", calls: bool = False, asked: bool | None = None) -> str:
        dialect = dialect_of(tokenizer, reasoning_parser=name)
        use = use_of(choice="required") if calls else None
        plan = dialect.plan(use, response=Constraint(regex="a"), prompt=prompt, asked_to_think=asked)
        assert plan.constraint is not None
        # What is written before the mark follows nothing: it must not pass for an answer.
        assert plan.thinking is None or plan.thinking.is_open == bool(plan.constraint.after)
        return plan.constraint.after

    assert after("qwen3") == "</think>"
    assert after("qwen3", asked=False) == ""
    assert after("mistral") == "[/THINK]"
    assert after("granite") == ""
    assert after("granite", asked=True) == "Here is my response:"
    assert after("openai_gptoss") == "<|channel|>final<|message|>"
    assert after("openai_gptoss", calls=True) == "<|start|>assistant"


# ── thoughts and calls ──────────────────────────────────────────────────────────────────────────────────────────────────

HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def test_harmony_says_thinks_and_calls() -> None:
    reasoning = parser_of("openai_gptoss")
    for pieces in ([HARMONY], list(HARMONY), [HARMONY[:70], HARMONY[70:]]):
        reader = AnswerReader(HarmonyParser(), reasoning())
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish("stop")
        message = added_up(deltas)
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert reader.finish_reason("stop") == "tool_calls"


def thinking_case(tokenizer: Tokenizer, texts: list[str], reason: str = "stop", **fields: Any) -> Case:
    case = Case(tokenizer, texts, reason, tools=[tool()], **fields)
    case._dialect = dialect_of(tokenizer, reasoning_parser="qwen3")
    return case


THOUGHT = "<think>Hm.</think>"
CALL = '<tool_call>[{"name": "weather", "arguments": {}}]</tool_call>'


def test_answers_with_thoughts(tokenizer: Tokenizer) -> None:
    case = thinking_case(tokenizer, [f"{THOUGHT}\nYes.", f"{THOUGHT}{CALL}", "Yes."], stream_options={"include_usage": True}, stream=True)  # fmt: skip
    whole = case.whole()
    said, called, plain = (choice["message"] for choice in whole["choices"])
    assert (said["reasoning_content"], said["content"]) == ("Hm.", "Yes.")
    assert (called["reasoning_content"], called["content"], len(called["tool_calls"])) == ("Hm.", None, 1)
    assert "reasoning_content" not in plain
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * len(THOUGHT)}, "a token is a byte"
    chunks = case.chunks(1)
    assert chunks[-1]["usage"] == whole["usage"]
    for index, message in enumerate((said, called, plain)):
        together = put_together(chunks, index)["message"]
        assert together.get("reasoning_content") == message.get("reasoning_content")
        assert together["content"] == message["content"]
    kinds = [key for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0 for key in choice["delta"]]
    assert kinds.index("reasoning_content") < len(kinds) - 1 - kinds[::-1].index("content")
    assert "content" not in kinds[2 : kinds.index("reasoning_content")], "thoughts come before all content"


def test_thoughts_that_never_end(tokenizer: Tokenizer) -> None:
    (choice,) = (whole := thinking_case(tokenizer, ["<think>Hm, "], "length").whole())["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm,", None)
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>Hm, ")


def test_thoughts_may_be_left_out(tokenizer: Tokenizer) -> None:
    plan = dialect_of(tokenizer, reasoning_parser="qwen3").plan(None, response=None, prompt="", shows_thoughts=False)
    reader = plan.reader()
    assert reader.push(f"{THOUGHT}Yes.") + reader.finish("stop") == [{"content": "Yes."}]
    assert "reasoning_content" not in reader.message()


def test_without_a_parser_usage_says_nothing_of_thoughts(tokenizer: Tokenizer) -> None:
    assert "completion_tokens_details" not in Case(tokenizer, ["a"]).whole()["usage"]


def test_what_is_promised_is_never_read_before_the_end_of_the_thoughts(tokenizer: Tokenizer) -> None:
    """A model that doesn't think, though its parser says it does, has followed nothing."""
    dialect = dialect_of(tokenizer, reasoning_parser="qwen3")

    def read(use: Any, text: str) -> tuple[AnswerReader, int]:
        plan = dialect.plan(use, response=None, prompt="")
        reader = plan.reader()
        reader.push(text)
        reader.finish("stop")
        return reader, len(plan.checked_calls(reader))

    for use in (use_of(choice="required"), use_of(tool(strict=True))):
        assert read(use, CALL)[0].message()["reasoning_content"] == CALL
        assert read(use, f"</think>{CALL}")[1] == 1
    reader, num_checked = read(use_of(), CALL)
    assert (len(reader.calls), num_checked) == (1, 0), "it is a call, and none that was enforced"
    assert read(use_of(), f"{THOUGHT}{CALL}")[1] == 1


# ── through a server: its template opens the thoughts, and the tiny model's are noise ───────────────────────────────────

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "r",
        "strict": True,
        "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
    },
}  # fmt: skip
NOT_TO = {"chat_template_kwargs": {"enable_thinking": False}}
ROOM: dict[str, Any] = {"max_tokens": 40, "close_on_length": True, "temperature": 1, "seed": 1}


@pytest.fixture(scope="module")
def thinking(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE)
    flags = ["--served-model-name", "tiny", "--reasoning-parser", "qwen3", "--chat-template", str(template)]
    with Server(tiny, *flags, "--kv-cache-memory", "16MiB") as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


@pytest.mark.slow
def test_a_format_is_followed_behind_the_thoughts(thinking: httpx.Client) -> None:
    answer = raw(thinking, response_format=FORMAT, **ROOM).json()
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"])["a"] in (1, 2)
    assert message["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 8
    events = chunks(thinking, response_format=FORMAT, **ROOM)
    together = added_up([event["choices"][0]["delta"] for event in events[1:-1] if event["choices"][0]["delta"]])
    assert (together["reasoning_content"], together["content"]) == (message["reasoning_content"], message["content"])
    hidden = raw(thinking, response_format=FORMAT, include_reasoning=False, **ROOM).json()["choices"][0]["message"]
    assert hidden == {key: value for key, value in message.items() if key != "reasoning_content"}


@pytest.mark.slow
def test_calls_are_made_behind_the_thoughts(thinking: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": FORMAT["json_schema"]["schema"]}}]  # type: ignore[index]
    room = {**ROOM, "max_tokens": 120}
    choice = raw(thinking, tools=tools, tool_choice="required", parallel_tool_calls=False, **room).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"] is None


@pytest.mark.slow
def test_thinking_can_be_switched_off(thinking: httpx.Client) -> None:
    message = raw(thinking, response_format=FORMAT, **NOT_TO, **ROOM).json()["choices"][0]["message"]
    assert json.loads(message["content"])["a"] in (1, 2)
    assert "reasoning_content" not in message
    plain = raw(thinking, **NOT_TO).json()["choices"][0]["message"]
    assert plain["content"]
    assert "reasoning_content" not in plain


@pytest.mark.slow
def test_all_may_be_thoughts(thinking: httpx.Client) -> None:
    choice = raw(thinking, max_tokens=8).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"]
    assert choice["finish_reason"] == "length"
