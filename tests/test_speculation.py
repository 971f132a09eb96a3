"""Drafts and forks on models that compute: a tiny one here, the built-in one under `real`. The same tokens, in fewer steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model
from trunkline import LLM, SamplingParams
from trunkline.outputs import CompletionOutput, RequestOutput

pytestmark = pytest.mark.slow  # together more than a second or two

TEXTS = [
    "hello world",
    "the quick brown fox jumps over the lazy dog. the quick brown",
    "what is it? what is",
    "1 2 3 1 2",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    with LLM(model, num_pages=256, threads=1, num_speculative_tokens=0) as llm:
        yield llm


def stop_the_clock(llm: LLM) -> None:
    """How many drafts there are follows measured times. A clock that stands still measures none: the first guess holds."""
    llm.engine.clock = lambda: 0.0


def said(outputs: list[RequestOutput]) -> list[Any]:
    """Everything a caller sees of the choices, but for the last bits of logprobs."""
    return [[_choice(choice) for choice in output.outputs] for output in outputs]


def _choice(choice: CompletionOutput) -> tuple[object, ...]:
    logprobs = [(entry.chosen.token_id, round(entry.chosen.logprob, 3)) for entry in choice.logprobs or ()]
    return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "seed": 3, "logprobs": 2},
        {"temperature": 0.7, "seed": 4, "presence_penalty": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "seed": 5, "n": 3},
        {"temperature": 0.7, "seed": 6, "n": 4, "stop": ("e",), "min_tokens": 4, "ignore_eos": False},
    ],
    ids=str,
)
def test_drafts_and_forks_change_nothing(model: str, plain: LLM, sampling: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 48, "ignore_eos": True} | sampling)
    expected = said(plain.generate(TEXTS, params, use_tqdm=False))
    lone = [said(plain.generate([text], params, use_tqdm=False))[0] for text in TEXTS]
    assert lone == expected
    with LLM(model, num_pages=256, threads=1) as llm:
        stop_the_clock(llm)
        assert said(llm.generate(TEXTS, params, use_tqdm=False)) == expected
        assert said(llm.generate(TEXTS, params, use_tqdm=False)) == expected
        assert sum(llm.engine.stats()["spec_decode_num_accepted_tokens_total"].values()) > 0
        llm.engine.scheduler.check()


def test_a_stop_string_among_several_tokens_counts_no_token_after_it(model: str, plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    text = plain.generate([TEXTS[1]], params, use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopping = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=(stop,))
    expected = plain.generate([TEXTS[1]], stopping, use_tqdm=False)
    with LLM(model, num_pages=256, threads=1) as llm:
        stop_the_clock(llm)
        llm.generate([TEXTS[1]], params, use_tqdm=False)  # so that the tree knows how it goes on
        before = llm.engine.stats()["step_tokens"]["count"]
        assert said(llm.generate([TEXTS[1]], stopping, use_tqdm=False)) == said(expected)
        num_tokens = len(expected[0].outputs[0].token_ids)
        assert llm.engine.stats()["step_tokens"]["count"] - before < num_tokens / 2 + 2


DOCUMENT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")[:2500]
QUESTIONS = [
    "What may I do with it?",
    "Who wrote it?",
    "What is a contribution?",
    "Name three conditions.",
    "Is it free?",
]


@pytest.mark.real
@pytest.mark.slow
def test_the_built_in_model_says_the_same_and_repeats_it_in_half_the_steps() -> None:
    """A RAG workload twice at temperature 0, and once each at 0.7 and 1.5, with drafts and without."""
    prompts = [f"{DOCUMENT}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    greedy = SamplingParams(temperature=0, max_tokens=64)
    hot = [SamplingParams(temperature=t, max_tokens=64, seed=11, n=2) for t in (0.7, 1.5)]
    with LLM(kv_cache_memory=2**28, num_speculative_tokens=0) as llm:
        expected = [said(llm.generate(prompts, params, use_tqdm=False)) for params in (greedy, *hot)]
    with LLM(kv_cache_memory=2**28) as llm:
        stop_the_clock(llm)
        steps = []
        for _ in ("first", "second"):
            before = llm.engine.stats()["step_tokens"]["count"]
            assert said(llm.generate(prompts, greedy, use_tqdm=False)) == expected[0]
            steps.append(llm.engine.stats()["step_tokens"]["count"] - before)
        assert steps[1] <= 0.5 * steps[0], steps
        assert [said(llm.generate(prompts, params, use_tqdm=False)) for params in hot] == expected[1:]
        assert sum(llm.engine.stats()["spec_decode_num_accepted_tokens_total"].values()) > 100
