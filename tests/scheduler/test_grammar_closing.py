"""Constrained texts that begin after a mark, and such as are brought to an end before their tokens are used up."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.scheduler.factories import ask, make_engine, run
from tests.tiny_grammars import EOS, TinyCompiler, lark, text_of, tiny_vocabulary
from trunkline.messages import Tokens

pytestmark = pytest.mark.slow  # together more than a second or two

# ---------------------------------------------------------------- the mark


@pytest.mark.parametrize("depth", [0, 1])
def test_a_text_is_free_until_its_mark_was_written(depth: int) -> None:
    mark = "k>ab"  # the stub chooses that one token sooner or later
    grammar = lark("start: /[0-9]{4}/", after=mark)
    vocabulary = tiny_vocabulary()
    seen = 0
    for seed in range(7):
        engine = make_engine(depth=depth, grammars=TinyCompiler())
        prompt = [seed + 1, 50]
        outcome = run(engine, ask("r", prompt, grammar, max_tokens=120))["r"]
        text = b"".join(vocabulary.tokens[token] for token in outcome.tokens)
        assert outcome.finished is not None and EOS not in outcome.tokens
        if mark.encode() in text:
            _, _, after = text.partition(mark.encode())
            seen += 1
            assert (after.isdigit() and len(after) == 4) or outcome.finished.reason == "length"
    assert seen > 2


# ---------------------------------------------------------------- closing

ROWS = lark(
    r"""start: "[" row ("," row)* "]"
row: "{\"name\":\"" /[a-z]{0,9}/ "\",\"age\":[" num ("," num)* "]}"
num: /[1-9][0-9]{0,2}/""",
    close_on_length=True,
)


def closing_prompts() -> list[list[int]]:
    return [[seed + 3, 8] for seed in range(4)]


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 0}])
def test_closed_texts_are_whole_at_every_length(sampling: dict[str, Any]) -> None:
    close_at(range(25), sampling, closed_at_least=15)


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 0}])
def test_closed_texts_are_whole(sampling: dict[str, Any]) -> None:
    close_at(range(0, 25, 6), sampling, closed_at_least=3)


def close_at(more: range, sampling: dict[str, Any], *, closed_at_least: int) -> None:
    """Texts of so many tokens more than the shortest has."""
    engine = make_engine(grammars=TinyCompiler(), num_pages=128)
    compilation = TinyCompiler().submit(ROWS)
    assert compilation.ending is not None
    least = len(compilation.ending)
    closed = 0
    for max_tokens in (least + num for num in more):
        for prompt in closing_prompts():
            name = f"{max_tokens} {prompt}"
            outcome = run(engine, ask(name, prompt, ROWS, max_tokens=max_tokens, **sampling))[name]
            finished = outcome.finished
            assert finished is not None and len(outcome.tokens) <= max_tokens
            rows = json.loads(text_of(outcome.tokens))
            assert rows and all(row.keys() == {"name", "age"} for row in rows)
            assert finished.reason == ("length" if finished.closed else "stop")
            closed += finished.closed
            for message in outcome.messages:
                if isinstance(message, Tokens) and sampling:
                    assert message.logprobs is not None
                    assert [entry.token_ids[0] for entry in message.logprobs] == message.token_ids
    assert closed >= closed_at_least


def what_follows(text: Any, request: Any, length: int) -> bytes:
    """Drafts from a text that is known."""
    return bytes(text[request.num_output :][:length].tobytes())


def test_closing_is_the_same_with_drafts_without_forced_tokens_and_with_logprobs() -> None:
    for max_tokens in (14, 26):
        for prompt in closing_prompts()[:2]:
            texts: list[list[int]] = []
            for kind in range(5):
                engine = make_engine(grammars=TinyCompiler(), forced_tokens=kind % 2 == 0, depth=kind // 4)
                if kind >= 2:
                    engine.scheduler.drafter.sources = {"tree": partial(what_follows, np.array(texts[0], "<i4"))}
                fields: dict[str, Any] = {"logprobs": 0} if kind == 3 else {}
                texts.append(run(engine, ask("r", prompt, ROWS, max_tokens=max_tokens, **fields))["r"].tokens)
            assert all(text == texts[0] for text in texts)


def test_too_few_tokens_for_any_text_are_refused() -> None:
    compilation = TinyCompiler().submit(ROWS)
    assert compilation.ending is not None
    least = len(compilation.ending)
    outcome = run(make_engine(grammars=TinyCompiler()), ask("r", [5], ROWS, max_tokens=least - 1))["r"]
    assert outcome.failed is not None and (outcome.failed.status, outcome.failed.param) == (400, "max_tokens")
    assert (
        f"max_tokens is {least - 1}; the shortest text that follows the schema has {least} tokens"
        in outcome.failed.message
    )


def test_a_free_text_is_closed_in_time_with_its_mark() -> None:
    grammar = lark(r'start: "[" /[1-9][0-9]{0,2}/ "]"', after="</think>", close_on_length=True)
    seen = 0
    for seed in range(12):
        for max_tokens in (4, 5, 9):
            engine = make_engine(grammars=TinyCompiler())
            outcome = run(engine, ask("r", [seed + 2], grammar, max_tokens=max_tokens))["r"]
            assert outcome.finished is not None and outcome.finished.completion_tokens <= max_tokens
            _, mark, answer = text_of(outcome.tokens).rpartition("</think>")
            assert mark and isinstance(json.loads(answer)[0], int)
            seen += outcome.finished.closed
    assert seen > 20
