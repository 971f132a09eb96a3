"""Embeddings offline: those of `transformers`, whatever the chunks, neighbours and ranks; and what a model was not made for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference_model import hidden_states
from tests.tiny import VOCAB_SIZE, tiny_embedder, tiny_model
from trunkline import LLM, SamplingParams
from trunkline.api.embedding_plan import EmbeddingPlan
from trunkline.errors import InvalidParameter, RequestError
from trunkline.models.pooling import PoolingSettings

PROMPTS = [
    np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()
    for seed, count in enumerate((1, 5, 40, 130, 300))
]
SMALL_STEPS: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 3,
    "threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def hidden(folder: Path) -> list[np.ndarray]:
    return hidden_states(folder, PROMPTS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SMALL_STEPS) as llm:
        yield llm


def check(llm: LLM, hidden: list[np.ndarray], pooling: str) -> None:
    outputs = llm.embed(PROMPTS, pooling=pooling, normalize=False)
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    for output, states in zip(outputs, hidden, strict=True):
        expected = states.mean(axis=0) if pooling == "mean" else states[-1]
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_equals_transformers(llm: LLM, hidden: list[np.ndarray], pooling: str) -> None:
    """Prompts longer than a step, in turns; then once more, when the cache has them."""
    check(llm, hidden, pooling)
    check(llm, hidden, pooling)
    cached = [output.cached_tokens for output in llm.embed(PROMPTS, pooling=pooling)]
    assert cached == ([0] * 5 if pooling == "mean" else [0, 0, 32, 128, 288])
    assert llm.generate([PROMPTS[3]], SamplingParams(max_tokens=1))[0].cached_tokens == 128


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("flags", [{"tensor_parallel_size": 2}, {"device": "cuda"}], ids=["two ranks", "triton"])
def test_equals_transformers_elsewhere(
    folder: Path, hidden: list[np.ndarray], flags: dict[str, Any], pooling: str
) -> None:
    """Two ranks that hold the model together; the Triton kernels in the interpreter."""
    with LLM(str(folder), **SMALL_STEPS, **flags) as llm:
        check(llm, hidden, pooling)


def test_a_model_without_an_output_layer(tmp_path: Path, hidden: list[np.ndarray]) -> None:
    """Its embeddings are those of the whole one, and it writes nothing."""
    with LLM(str(tiny_embedder(tmp_path / "embedder")), **SMALL_STEPS) as llm:
        check(llm, hidden, "mean")
        for sampling in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=0, prompt_logprobs=0)):
            with pytest.raises(InvalidParameter, match="no output layer, so it writes no text"):
                llm.generate("hello", sampling)
        assert not llm.engine.has_work


def test_unit_length_unless_it_is_not_wanted(llm: LLM) -> None:
    (unit,), (raw,) = llm.embed("hello world"), llm.embed("hello world", normalize=False)
    assert np.linalg.norm(unit.outputs.embedding) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(raw.outputs.embedding) != pytest.approx(1, abs=0.1)
    scaled = np.array(raw.outputs.embedding) / np.linalg.norm(raw.outputs.embedding)
    np.testing.assert_allclose(unit.outputs.embedding, scaled, atol=1e-6)
    assert unit.prompt == "hello world" and unit.finished
    assert llm.embed([]) == []


def test_a_prompt_that_cannot_be_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="maximum context length is 512 tokens"):
        llm.embed([[1] * 10, [1] * 513])
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="empty"):
        llm.embed([[]])
    assert len(llm.embed([[1] * 512])[0].outputs.embedding) == 64


def plan(settings: PoolingSettings | None = None, **wishes: Any) -> EmbeddingPlan:
    return EmbeddingPlan.of(settings or PoolingSettings(), 64, **wishes)


def test_the_checkpoint_decides_what_is_left_open() -> None:
    assert plan() == EmbeddingPlan("last", True, 64)
    trained = PoolingSettings(method="mean", normalize=False, dimensions=(16, 32))
    assert plan(trained) == EmbeddingPlan("mean", False, 64)
    assert plan(trained, pooling="last", normalize=True, dimensions=16) == EmbeddingPlan("last", True, 16)


@pytest.mark.parametrize(
    ("settings", "wishes", "sentence"),
    [
        ({}, {"pooling": "cls"}, r"'pooling' is 'cls'; allowed is \"mean\" or \"last\"\."),
        ({"method": "cls"}, {}, r"asks for cls pooling.*allowed is \"mean\" or \"last\".*--pooling"),
        ({"unbuilt": ("Dense",)}, {"pooling": "mean"}, "go through Dense"),
        ({}, {"dimensions": 32}, "'dimensions' is 32; allowed is 64, .* does not support specifying fewer"),
        ({"dimensions": (16, 32)}, {"dimensions": 17}, "'dimensions' is 17; allowed is one of 16, 32, .* or 64"),
        ({"dimensions": None}, {"dimensions": 65}, "'dimensions' is 65; allowed is an integer from 1 to 64"),
        ({"dimensions": None}, {"dimensions": 0}, "'dimensions' is 0"),
        ({"dimensions": None}, {"dimensions": True}, "'dimensions' is true"),
    ],
)
def test_what_a_model_was_not_made_for(settings: dict[str, Any], wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=sentence):
        plan(PoolingSettings(**settings), **wishes)


def test_what_may_be_asked_all_the_same() -> None:
    assert plan(PoolingSettings(method="cls"), pooling="mean").pooling == "mean"
    assert plan(dimensions=64).length == plan(PoolingSettings(dimensions=(16,)), dimensions=64).length == 64
    assert plan(PoolingSettings(dimensions=None), dimensions=1).length == 1


def test_it_is_cut_before_its_length_is_made_one() -> None:
    pooled = np.array([3, 4, 12] + [0] * 61, "<f4").tobytes()
    np.testing.assert_allclose(EmbeddingPlan("last", True, 2).finish(pooled), [0.6, 0.8], atol=1e-7)
    assert EmbeddingPlan("last", False, 3).finish(pooled).tolist() == [3, 4, 12]
    assert EmbeddingPlan("last", True, 64).finish(bytes(256)).tolist() == [0] * 64
