"""Requests that only want an embedding, on the stub worker: the hidden state of a token is (its id, 1)."""

import numpy as np
import pytest

from tests.scheduler.factories import Driver, generate, make_engine
from tests.stub import VOCAB_SIZE, continuation
from trunkline.messages import Finished, Generate, Tokens


def embed(request_id: str, prompt: list[int], pooling: str) -> Generate:
    asked = generate(request_id, prompt, max_tokens=0)
    return Generate(request_id=request_id, prompt=asked.prompt, sampling=asked.sampling, pooling=pooling)


def embedding(driver: Driver, request_id: str) -> list[float]:
    finished = driver.outcomes[request_id].finished
    assert finished is not None, driver.outcomes[request_id].failed
    assert (finished.reason, finished.completion_tokens) == ("length", 0)
    return np.frombuffer(finished.embedding, "<f4").tolist()


def prompts(count: int, *, least: int = 1, most: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB_SIZE, rng.integers(least, most)).tolist() for _ in range(count)]


def expected(prompt: list[int], pooling: str) -> list[float]:
    return pytest.approx([np.mean(prompt) if pooling == "mean" else prompt[-1], 1])  # type: ignore[return-value]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_in_chunks_beside_others_that_generate(pooling: str, depth: int) -> None:
    """Few tokens a step, and pages for some of them at a time; two texts go on meanwhile."""
    engine = make_engine(depth=depth, num_pages=60, max_num_batched_tokens=16, max_num_seqs=6)
    driver, asked = Driver(engine), prompts(20)
    driver.send(generate("a", [1, 2, 3], max_tokens=30), generate("b", [4, 5], max_tokens=30))
    driver.send(*(embed(f"e{index}", prompt, pooling) for index, prompt in enumerate(asked)))
    driver.drain()
    for index, prompt in enumerate(asked):
        assert embedding(driver, f"e{index}") == expected(prompt, pooling)
    assert driver.outcomes["a"].tokens == continuation([1, 2, 3], 30)
    assert driver.outcomes["b"].tokens == continuation([4, 5], 30)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_after_a_preemption_it_is_made_anew(pooling: str) -> None:
    """A text that grows takes the pages of embeddings that are half made."""
    engine = make_engine(num_pages=16, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64)
    driver, prompt = Driver(engine), list(range(30))
    driver.send(generate("a", [90, 91], max_tokens=40, ignore_eos=True))
    for _ in range(8):
        driver.step()
    driver.send(embed("e", prompt, pooling))
    while not engine.scheduler.requests["e"].num_computed >= 16:
        driver.step()
    engine.scheduler._preempt(engine.scheduler.requests["e"])
    driver.drain()
    assert engine.scheduler.counters.preemptions >= 1
    assert embedding(driver, "e") == expected(prompt, pooling)
    assert driver.outcomes["a"].tokens == continuation([90, 91], 40)


def test_the_cache_helps_the_last_token_alone_and_both_fill_it() -> None:
    driver, prompt = Driver(make_engine()), list(range(22))
    for request_id, pooling, cached in (("m0", "mean", 0), ("l0", "last", 20), ("m1", "mean", 0), ("l1", "last", 20)):
        driver.send(embed(request_id, prompt, pooling))
        driver.drain()
        assert embedding(driver, request_id) == expected(prompt, pooling)
        first, last = driver.outcomes[request_id].messages
        assert isinstance(first, Tokens) and isinstance(last, Finished)
        assert (first.cached_tokens, last.cached_tokens, last.prompt_tokens) == (cached, cached, 22)
        assert first.cache_report is not None
        assert first.cache_report.reason == ("pooling" if pooling == "mean" else "complete")
    driver.send(generate("g", prompt))
    driver.drain()
    assert driver.outcomes["g"].cached_tokens == 20 and driver.outcomes["g"].tokens == continuation(prompt, 8)


def test_a_prompt_as_long_as_the_context() -> None:
    """There is nothing to generate, so no room is kept for it."""
    driver, prompt = Driver(make_engine(max_model_len=40)), list(range(40))
    driver.send(embed("e", prompt, "mean"), embed("longer", [*prompt, 1], "mean"))
    driver.drain()
    assert embedding(driver, "e") == expected(prompt, "mean")
    failed = driver.outcomes["longer"].failed
    assert failed is not None and failed.code == "context_length_exceeded"


def test_what_cannot_be_read_fails_alone() -> None:
    driver = Driver(make_engine(poison_token=13, max_num_batched_tokens=8))
    driver.send(embed("bad", [1, 2, 13, 4], "mean"), embed("good", [1, 2, 3], "mean"))
    driver.drain()
    assert driver.outcomes["bad"].failed is not None
    assert embedding(driver, "good") == expected([1, 2, 3], "mean")


@pytest.mark.parametrize("wrong", ["cls", "MEAN"])
def test_a_pooling_that_there_is_not(wrong: str) -> None:
    driver = Driver(make_engine())
    driver.send(embed("e", [1, 2], wrong))
    failed = driver.outcomes["e"].failed
    assert failed is not None and failed.status == 400 and wrong in failed.message
