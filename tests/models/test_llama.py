"""The Llama forward pass: right by a float64 oracle and by `transformers`, and complaints about weights."""

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference_model import greedy_gaps, load_reference
from tests.tiny import VOCAB_SIZE, tiny_gguf, tiny_model
from tests.workers.plans import PAGE_SIZE, Chunk, need_compiler, pages_for, run, tiny_runner
from trunkline.config import ModelSource
from trunkline.errors import ModelError
from trunkline.kernels.interface import Kernels, make_batch
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.select import cpu_kernels
from trunkline.models.checkpoint import Checkpoint, builtin_model, open_checkpoint
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Loader, RopeTable
from trunkline.models.registry import Model, make_model
from trunkline.workers.runner import ModelRunner, load_runner

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, tied": {},
    "one kv head, untied": {"num_kv_heads": 1, "tie": False},
    "every head its own": {"num_kv_heads": 4},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True, "tie": False},
    "heads wider than the hidden size": {"head_dim": 48, "num_heads": 2, "num_kv_heads": 1},
    "odd sizes": {
        "hidden_size": 40,
        "intermediate_size": 51,
        "num_heads": 5,
        "num_kv_heads": 5,
        "vocab_size": VOCAB_SIZE + 7,
    },
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
}
PROMPT = np.random.default_rng(5).integers(0, VOCAB_SIZE, 100).tolist()


def compiled_logits(runner: ModelRunner) -> Tensor:
    """Logits of every position of PROMPT, read in two steps."""
    pages = pages_for(len(PROMPT))
    steps = [Chunk(PROMPT, 0, 37, pages), Chunk(PROMPT, 37, len(PROMPT), pages)]
    return torch.cat([run(runner, [step], all_rows=True) for step in steps])


def oracle_logits(checkpoint: Checkpoint) -> Tensor:
    """The same in float64, in one step."""
    model = make_model(checkpoint.config, Loader(checkpoint.tensors(), ReferenceKernels(torch.float64), torch.float64))
    return whole_prompt(model, ReferenceKernels(torch.float64), torch.float64)(torch.arange(len(PROMPT)))


def whole_prompt(model: Model, kernels: Kernels, dtype: torch.dtype) -> Callable[[Tensor | None], Tensor]:
    """Logits of the rows of PROMPT that are wanted, in one step."""
    config, count = model.config, len(PROMPT)
    num_pages = math.ceil(count / PAGE_SIZE)
    kv = kernels.allocate_kv(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    batch = make_batch(
        positions=np.arange(count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        context_len=np.array([count], np.int32),
        page_table=np.arange(num_pages, dtype=np.int32)[None],
        page_size=PAGE_SIZE,
        num_pages=num_pages,
    )
    ids = torch.tensor(PROMPT, dtype=torch.int32)
    return lambda wanted: model.forward(ids, kernels.prepare(batch, kv), kv, wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_are_all_wanted_need_not_be_named(tmp_path: Path, compiled: bool) -> None:
    if compiled:
        need_compiler()
    tiny_model(tmp_path)
    checkpoint = open_checkpoint(ModelSource(path=str(tmp_path)))
    kernels = cpu_kernels(1, head_dim=checkpoint.config.head_dim) if compiled else ReferenceKernels()
    model = make_model(checkpoint.config, Loader(checkpoint.tensors(), kernels, torch.float32))
    logits = whole_prompt(model, kernels, torch.float32)
    named = logits(torch.arange(len(PROMPT)))
    hidden = model.last_hidden(len(PROMPT)).clone()
    assert torch.equal(logits(None), named)
    assert torch.equal(model.last_hidden(len(PROMPT)), hidden) and torch.equal(model.last_hidden(3), hidden[:3])


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert float((ours.double() - theirs).abs().max() / theirs.abs().max()) < tolerance


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 1e-1)])
def test_equals_the_oracle(tmp_path: Path, variant: str, dtype: str, tolerance: float) -> None:
    need_compiler()
    runner = tiny_runner(tmp_path, dtype=dtype, **VARIANTS[variant])
    checkpoint = open_checkpoint(ModelSource(path=str(tmp_path)))
    assert_close(compiled_logits(runner), oracle_logits(checkpoint), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(tmp_path: Path, variant: str) -> None:
    need_compiler()
    runner = tiny_runner(tmp_path, **VARIANTS[variant])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaForCausalLM

        theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        logits = theirs(torch.tensor([PROMPT])).logits[0]
    assert_close(compiled_logits(runner), logits.double(), 1e-4)


def test_gguf_gives_the_same_logits(tmp_path: Path) -> None:
    need_compiler()
    folder = tiny_model(tmp_path / "hf", rope_scaling=LLAMA3)
    file = tiny_gguf(tmp_path / "tiny.gguf", rope_scaling=LLAMA3)
    runners = [load_runner(open_checkpoint(ModelSource(path=str(path))), "float32", 1) for path in (folder, file)]
    for runner in runners:
        runner.allocate(20, PAGE_SIZE)
    hf, gguf = map(compiled_logits, runners)
    assert_close(gguf, hf.double(), 1e-5)  # llama3's factors are stored as float32


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
def test_rope_table(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    tiny_model(tmp_path, rope_scaling=scaling, max_position_embeddings=10_000)
    config = open_checkpoint(ModelSource(path=str(tmp_path))).config
    table = RopeTable(config.rope, config)
    short = table.upto(10).clone()
    grown = table.upto(9_000)
    assert torch.equal(short, grown[: len(short)]) and len(short) >= 10 and len(grown) >= 9_000
    half = config.head_dim // 2
    for position in (0, 1, 8_999):
        for i, frequency in enumerate(config.rope.inverse_frequencies(config.head_dim)):
            angle = position * frequency
            assert grown[position, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert grown[position, half + i].item() == pytest.approx(math.sin(angle), abs=1e-6)


class TestWeights:
    @pytest.fixture
    def tensors(self, tmp_path: Path) -> Iterator[tuple[ModelConfig, dict[str, Tensor]]]:
        checkpoint = open_checkpoint(ModelSource(path=str(tiny_model(tmp_path, tie=False))))
        yield checkpoint.config, {name: tensor.clone() for name, tensor in checkpoint.tensors()}

    def build(self, config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Model:
        return make_model(config, Loader(tensors.items(), ReferenceKernels(), dtype))

    def test_order_does_not_matter(self, tensors: tuple[ModelConfig, dict[str, Tensor]]) -> None:
        config, by_name = tensors
        self.build(config, dict(reversed(by_name.items())))

    def test_one_missing(self, tensors: tuple[ModelConfig, dict[str, Tensor]]) -> None:
        config, by_name = tensors
        del by_name["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(ModelError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
            self.build(config, by_name)

    def test_one_too_many(self, tensors: tuple[ModelConfig, dict[str, Tensor]]) -> None:
        config, by_name = tensors
        by_name["model.layers.7.mlp.up_proj.weight"] = torch.ones(1)
        with pytest.raises(ModelError, match=r"has the tensor 'model\.layers\.7\.mlp\.up_proj\.weight', for which"):
            self.build(config, by_name)

    @pytest.mark.parametrize("value", [1e6, math.nan, math.inf])
    def test_a_number_float16_cannot_hold(self, tensors: tuple[ModelConfig, dict[str, Tensor]], value: float) -> None:
        config, by_name = tensors
        by_name["lm_head.weight"][3, 4] = value
        with pytest.raises(ModelError, match=r"'lm_head.weight' holds .*; float16 reaches to 65504"):
            self.build(config, by_name, torch.float16)

    def test_unknown_architecture(self, tensors: tuple[ModelConfig, dict[str, Tensor]]) -> None:
        config, by_name = tensors
        with pytest.raises(ModelError, match="architecture is 'gpt2'; those that can be run are llama"):
            self.build(msgspec.structs.replace(config, architecture="gpt2"), by_name)


@pytest.mark.real
@pytest.mark.slow
def test_greedy_text_equals_transformers() -> None:
    """Three prompts × 32 tokens of the built-in model in float32: each token is the reference's choice after those before it."""
    need_compiler()
    prompts = [[504, 3575, 282, 4649, 314], [1604, 3525, 28, 281, 253, 1165, 4693], list(range(300, 420))]
    runner = load_runner(open_checkpoint(ModelSource(path=builtin_model())), "float32")
    runner.allocate(200, 16)
    reference = load_reference(builtin_model())
    for prompt in prompts:
        ours, first = list(prompt), 0
        while len(ours) < len(prompt) + 32:
            logits = run(runner, [Chunk(ours, first, len(ours), pages_for(len(ours), page_size=16))])
            first = len(ours)
            ours.append(int(logits[0].argmax()))
        choices = greedy_gaps(reference, prompt, ours[len(prompt) :])
        assert ours[len(prompt) :] == [token_id for token_id, _ in choices]
