"""Every architecture against transformers on the same random weights: logits, greedy tokens, cached prefixes, windows, ways of RoPE."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.architectures import CONFIGS, WINDOW, save_gguf, save_tiny, theirs
from tests.kernels.ranks import on_ranks
from tests.models.test_llama import LLAMA3
from tests.models.test_split import logits as split_logits
from tests.models.test_split import opened
from tests.tiny import VOCAB_SIZE
from tests.workers.plans import PAGE_SIZE, Chunk, need_compiler, pages_for, run
from trunkline.config import ModelSource
from trunkline.kernels.collectives import ALONE
from trunkline.models.architectures import ARCHITECTURES
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.registry import BLOCKS
from trunkline.workers.runner import ModelRunner, load_runner

PROMPT = np.random.default_rng(3).integers(0, VOCAB_SIZE - 8, 70).tolist()
NEW_TOKENS = 64

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [2.0 + 0.5 * i for i in range(4)],
}
# What config.json may add: name -> architecture, its keys, and the longest context that is served.
ROPES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, None),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, None),
    "yarn": ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e4}}, None),
    "yarn, all said": (
        "qwen2",
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}
        },
        None,
    ),
    "dynamic, short": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        512,
    ),
    "longrope, long": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 48,
        },
        None,
    ),
    "longrope, short": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 256,
        },
        256,
    ),
}

# What GGUF files do not say, as those models have it that were released.
AS_RELEASED: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7},
}


def opened_runner(folder: Path, max_model_len: int | None = None) -> ModelRunner:
    source = ModelSource(path=str(folder), max_model_len=max_model_len)
    runner = load_runner(open_checkpoint(source), "float32", 1)
    runner.allocate(100, PAGE_SIZE)
    return runner


def logits_of(runner: ModelRunner, token_ids: list[int], cuts: list[int]) -> Tensor:
    """Of every position, computed in steps that end at `cuts`."""
    pages = pages_for(len(token_ids))
    starts = [0, *cuts]
    steps = [Chunk(token_ids, first, last, pages) for first, last in zip(starts, [*cuts, len(token_ids)], strict=True)]
    return torch.cat([run(runner, [step], all_rows=True) for step in steps])


def their_logits(folder: Path, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return theirs(folder)(torch.tensor([token_ids]), use_cache=False).logits[0]


def assert_equal_logits(ours: Tensor, reference: Tensor) -> None:
    assert float((ours - reference).abs().max() / reference.abs().max()) < 1e-4


def test_each_architecture_has_a_block_and_a_test() -> None:
    assert set(ARCHITECTURES) == set(BLOCKS) == set(CONFIGS)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_greedy_tokens_and_logits_equal_transformers(tmp_path: Path, architecture: str) -> None:
    """64 tokens behind a prompt of four windows; then the whole text again in chunks, upon the first pages of it that are cached."""
    need_compiler()
    folder = save_tiny(architecture, tmp_path)
    runner = opened_runner(folder)
    text, pages = list(PROMPT), pages_for(len(PROMPT) + NEW_TOKENS)
    step = run(runner, [Chunk(text, 0, len(text), pages)], all_rows=True)
    rows = [step]
    while len(text) < len(PROMPT) + NEW_TOKENS:
        text.append(int(step[-1].argmax()))
        step = run(runner, [Chunk(text, len(text) - 1, len(text), pages)], all_rows=True)
        rows.append(step)
    reference = their_logits(folder, text)
    assert_equal_logits(torch.cat(rows), reference)
    assert text[len(PROMPT) :] == reference[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()
    cached = 3 * PAGE_SIZE
    again = Chunk(text, cached, len(text), [*pages[:3], *pages_for(len(text), first=50)[3:]])
    assert torch.equal(run(runner, [again], all_rows=True), torch.cat(rows)[cached:])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name, keys in CONFIGS.items() if "sliding_window" in keys])
def test_a_window_hides_what_is_older(tmp_path: Path, architecture: str) -> None:
    """With every layer windowed, what the last token can be reached from is layers × (window - 1) tokens back, and no further."""
    need_compiler()
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2}
    if architecture in ("mistral", "phi3"):
        kinds = {}
    runner = opened_runner(save_tiny(architecture, tmp_path, num_hidden_layers=2, **kinds))
    reach = 2 * (WINDOW - 1)
    last = logits_of(runner, PROMPT, [])[-1]
    for back, is_seen in ((reach, True), (reach + 1, False)):
        changed = list(PROMPT)
        changed[len(PROMPT) - 1 - back] ^= 1
        assert torch.equal(logits_of(runner, changed, [])[-1], last) != is_seen


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
def test_ways_of_rope_equal_transformers(tmp_path: Path, rope: str) -> None:
    need_compiler()
    architecture, keys, max_model_len = ROPES[rope]
    folder = save_tiny(architecture, tmp_path, **keys)
    ours = logits_of(opened_runner(folder, max_model_len), PROMPT, [30])
    assert_equal_logits(ours, their_logits(folder, PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name, a in ARCHITECTURES.items() if a.gguf])
def test_gguf_gives_the_same_logits(tmp_path: Path, architecture: str) -> None:
    """Files say less than config.json: what they leave out is what the released models of this kind have."""
    need_compiler()
    folder = save_tiny(architecture, tmp_path / "hf", **AS_RELEASED.get(architecture, {}))
    file = save_gguf(architecture, folder, tmp_path / "tiny.gguf")
    hf, ours = (logits_of(opened_runner(path), PROMPT, [30]) for path in (folder, file))
    assert float((hf - ours).abs().max() / hf.abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("max_model_len", [256, 512])
def test_longrope_of_gguf(tmp_path: Path, max_model_len: int) -> None:
    need_compiler()
    architecture, keys, _ = ROPES["longrope, short"]
    folder = save_tiny(architecture, tmp_path / "hf", **keys)
    file = save_gguf(architecture, folder, tmp_path / "tiny.gguf")
    hf, ours = (logits_of(opened_runner(path, max_model_len), PROMPT, []) for path in (folder, file))
    assert float((hf - ours).abs().max() / hf.abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_two_ranks_together_equal_one(tmp_path: Path, architecture: str) -> None:
    checkpoint = opened(save_tiny(architecture, tmp_path / "tiny"))
    alone = split_logits(checkpoint, ALONE, torch.float64)
    for together in on_ranks(2, tmp_path / "ranks", lambda ranks: split_logits(checkpoint, ranks, torch.float64)):
        assert float((together - alone).abs().max() / alone.abs().max()) < 1e-9
