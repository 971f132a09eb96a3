"""The built-in model, real weights: equal to `transformers`, and the same whatever the schedule."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference_model import greedy_gaps, load_reference
from trunkline import LLM, SamplingParams
from trunkline.models.checkpoint import builtin_model

pytestmark = [pytest.mark.real, pytest.mark.slow]

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
TIE = 1e-3

QUESTIONS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "In 1969, humans first",
    "A recipe for apple pie:\n1.",
    "Q: What is the largest planet?\nA:",
    "Zażółć gęślą jaźń means",
    '{"name": "Alice", "age":',
]
LENGTHS = [20, 60, 120, 200, 333, 512, 513, 700, 1024, 1300, 1700, 2000]


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    with LLM(dtype="float32", kv_cache_memory=2**29) as llm:
        yield llm


def long_prompts(llm: LLM) -> list[list[int]]:
    ids = llm.tokenizer.encode(TEXT)
    assert len(ids) > max(LENGTHS)
    return [ids[:length] for length in LENGTHS]


def test_greedy_output_equals_transformers(exact: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """24 prompts × 64 tokens, each token checked against the reference given the same tokens before it."""
    prompts = [exact.tokenizer.encode(question) for question in QUESTIONS] + long_prompts(exact)
    outputs = exact.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    reference = load_reference(builtin_model())
    ties = 0
    for output in outputs:
        prompt, ours = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert len(ours) == 64
        for at, (theirs, gap) in enumerate(greedy_gaps(reference, prompt, ours)):
            if theirs != ours[at]:
                assert gap < TIE, (
                    f"prompt of {len(prompt)}: token {at} is {ours[at]}, the reference's {theirs}, ahead by {gap}"
                )
                ties += 1
    with capsys.disabled():
        print(
            f"\n{len(prompts)} prompts × 64 tokens equal transformers' greedy choice, but for {ties} ties within {TIE}"
        )


def test_same_tokens_cold_warm_alone_batched_chunked_preempted_uncached() -> None:
    """50 greedy requests in the default format give the same tokens in every schedule."""
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def run(*, alone: bool = False, again: bool = False, **settings: object) -> tuple[list[tuple[int, ...]], LLM]:
        with LLM(kv_cache_memory=2**28, **settings) as llm:  # type: ignore[arg-type]
            if "num_pages" in settings:  # memory is kept for who has waited long: a slow machine would preempt nobody
                llm.engine.clock = lambda: 0.0
            stem = llm.tokenizer.encode(TEXT[:1500])
            prompts = [stem[: 7 * i] + llm.tokenizer.encode(f" {QUESTIONS[i % 12]} {i}") for i in range(50)]
            for _ in range(2 if again else 1):
                batches = [[prompt] for prompt in prompts] if alone else [prompts]
                outputs = [output for batch in batches for output in llm.generate(batch, sampling, use_tqdm=False)]
            return [output.outputs[0].token_ids for output in outputs], llm

    expected, _ = run(alone=True, enable_prefix_caching=False)  # cold: nothing is ever reused
    warm, llm = run(again=True)
    assert warm == expected
    assert llm.engine.scheduler.counters.prefix_cache_hits > 10_000
    assert run(max_num_seqs=32)[0] == expected
    assert run(alone=True)[0] == expected
    assert run(max_num_batched_tokens=17, max_num_seqs=17)[0] == expected
    assert run(enable_prefix_caching=False)[0] == expected
    for enable_prefix_caching in (True, False):
        preempted, llm = run(num_pages=60, max_model_len=900, enable_prefix_caching=enable_prefix_caching)
        assert llm.engine.scheduler.counters.preemptions > 0
        assert preempted == expected


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_answers_are_sensible_however_weights_are_stored(quantization: str) -> None:
    with LLM(quantization=quantization, kv_cache_memory=2**29) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=8)
        capital, numbers = (output.outputs[0].text for output in llm.generate([QUESTIONS[0], QUESTIONS[3]], sampling))
    assert capital.startswith(" Paris") and numbers.startswith(" 7, 8, 9")
