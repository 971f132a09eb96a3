"""Models split over ranks: the parts, reading them, and the logits of ranks in threads against one rank's."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ranks import on_ranks
from tests.models.test_llama import PROMPT, assert_close
from tests.tiny import VOCAB_SIZE, tiny_gguf, tiny_model
from tests.workers.plans import PAGE_SIZE
from trunkline.config import ModelSource
from trunkline.errors import ConfigError
from trunkline.kernels.collectives import ALONE, Collectives
from trunkline.kernels.interface import make_batch
from trunkline.kernels.quantized import QuantizedMatrix
from trunkline.kernels.reference import ReferenceKernels
from trunkline.models.checkpoint import Checkpoint, builtin_model, open_checkpoint
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Loader
from trunkline.models.registry import make_model
from trunkline.models.split import WHOLE, Split
from trunkline.models.weights import tensor_shapes

LARGE = {"hidden_size": 64, "num_heads": 8, "head_dim": 8, "intermediate_size": 96}
HEADS = {"8/2": LARGE | {"num_kv_heads": 2}, "8/1": LARGE | {"num_kv_heads": 1}, "4/4": {"num_kv_heads": 4}}


def opened(path: Path, load_format: str = "auto") -> Checkpoint:
    return open_checkpoint(ModelSource(path=str(path), load_format=load_format))


def logits(checkpoint: Checkpoint, ranks: Collectives, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of every position of PROMPT, in two steps."""
    kernels, split = ReferenceKernels(dtype), Split(ranks.rank, ranks.size)
    model = make_model(checkpoint.config, Loader(checkpoint.tensors(split=split), kernels, dtype, ranks))
    num_pages = -(-len(PROMPT) // PAGE_SIZE)
    kv = kernels.allocate_kv(
        num_layers=model.config.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=dtype,
    )
    results = []
    for first, last in ((0, 61), (61, len(PROMPT))):
        batch = make_batch(
            positions=np.arange(first, last, dtype=np.int32),
            query_start=np.array([0, last - first], np.int32),
            context_len=np.array([last], np.int32),
            page_table=np.arange(num_pages, dtype=np.int32)[None],
            page_size=PAGE_SIZE,
            num_pages=num_pages,
        )
        ids = torch.tensor(PROMPT[first:last], dtype=torch.int32)
        results.append(model.forward(ids, batch, kv, torch.arange(last - first)))
    return torch.cat(results)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("heads", HEADS)
def test_ranks_together_equal_one(tmp_path: Path, heads: str, tie: bool, size: int) -> None:
    """With biases everywhere, and a vocabulary that the ranks do not divide."""
    overrides: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie": tie, "vocab_size": VOCAB_SIZE + 7}
    checkpoint = opened(tiny_model(tmp_path / "tiny", **HEADS[heads], **overrides))
    assert checkpoint.config.vocab_size % size
    alone = logits(checkpoint, ALONE, torch.float64)
    together = on_ranks(size, tmp_path / "ranks", lambda ranks: logits(checkpoint, ranks, torch.float64))
    for of_rank in together:
        assert torch.equal(of_rank, together[0]), "every rank has all logits"
    assert together[0].shape == alone.shape == (len(PROMPT), checkpoint.config.vocab_size)
    assert_close(together[0], alone, 1e-12)


CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=48,
    intermediate_size=60,
    num_layers=1,
    num_heads=12,
    num_kv_heads=4,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    dtype="float32",
)


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_the_parts_are_the_whole(size: int) -> None:
    """Each entry of each tensor is in one part; in three, where three ranks share a kv head; in all, where nothing is split."""
    for name, shape in tensor_shapes(CONFIG).items():
        times = np.zeros(shape, int)
        for rank in range(size):
            split = Split(rank, size)
            if split.holds(name):
                times[split.index(name, CONFIG)] += 1
        shared = max(1, size // CONFIG.num_kv_heads) if ".k_proj." in name or ".v_proj." in name else 1
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            shared = 1
        elif "norm" in name:
            shared = size
        assert (times == shared).all(), (name, times)


@pytest.mark.parametrize("rank", range(12))
def test_query_heads_meet_their_own_kv_head(rank: int) -> None:
    """Query head q reads kv head q // 3; of twelve ranks, each has one query head and the kv head that it reads."""
    split = Split(rank, 12)
    (queries,) = split.index("model.layers.0.self_attn.q_proj.weight", CONFIG)
    (keys,) = split.index("model.layers.0.self_attn.k_proj.weight", CONFIG)
    assert (queries, keys) == (slice(4 * rank, 4 * rank + 4), slice(4 * (rank // 3), 4 * (rank // 3) + 4))
    assert (split.config(CONFIG).num_heads, split.config(CONFIG).num_kv_heads) == (1, 1)


@pytest.mark.parametrize("size", [5, 8, 24])
def test_what_does_not_divide_is_refused(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Split(0, size).check(CONFIG)
    assert str(caught.value) == (
        f"--tensor-parallel-size is {size}, but 12 query heads, 4 key-value heads and 60 inner units of the MLP, which this"
        f" model has, can't be dealt out to {size} ranks evenly; allowed are 1, 2, 4, 12."
    )


def test_the_inner_size_must_divide_too() -> None:
    config = msgspec.structs.replace(CONFIG, intermediate_size=61)
    with pytest.raises(ConfigError, match=r"61 inner units of the MLP.* allowed is 1\."):
        Split(0, 2).check(config)


def test_kv_heads_that_some_ranks_would_need_two_of_are_refused() -> None:
    """Six query heads, two kv heads, three ranks: the middle rank's two query heads would read both."""
    config = msgspec.structs.replace(CONFIG, num_heads=6, num_kv_heads=2, head_dim=8)
    with pytest.raises(ConfigError, match="allowed are 1, 2, 6"):
        Split(0, 3).check(config)


def test_the_built_in_model_goes_on_three_ranks() -> None:
    """SmolLM2-135M's nine query heads and three kv heads."""
    config = msgspec.structs.replace(CONFIG, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536)
    with pytest.raises(ConfigError, match=r"size is 2, but 9 query heads, 3 key-value heads.* allowed are 1, 3\."):
        Split(0, 2).check(config)
    Split(2, 3).check(config)


# Reading.

SPLITS = st.integers(1, 4).flatmap(lambda size: st.builds(Split, st.integers(0, size - 1), st.just(size)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """The same shapes in every format, with a size of GGUF blocks that four ranks do not divide."""
    folder = tmp_path_factory.mktemp("formats")
    shape: dict[str, Any] = {
        "num_heads": 12, "num_kv_heads": 4, "head_dim": 8, "hidden_size": 96, "intermediate_size": 132, "num_layers": 1,
        "tie": False, "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip
    return {
        "safetensors": opened(tiny_model(folder / "hf", **shape)),
        "bfloat16": opened(tiny_model(folder / "bf16", dtype="bfloat16", **shape)),
        "gguf": opened(tiny_gguf(folder / "tiny.gguf", quantization="Q8_0", **shape | NO_BIAS)),
        "4 bits": opened(tiny_gguf(folder / "q4.gguf", quantization="Q4_1", **shape | NO_BIAS)),
        "dummy": opened(folder / "hf", "dummy"),
    }


NO_BIAS = {"attention_bias": False, "mlp_bias": False}  # llama-type GGUF files have none


@pytest.mark.parametrize("load_format", ["safetensors", "bfloat16", "gguf", "dummy"])
@given(split=SPLITS)
@settings(max_examples=12)
def test_reading_a_part_is_cutting_it_from_the_whole(
    checkpoints: dict[str, Checkpoint], load_format: str, split: Split
) -> None:
    checkpoint = checkpoints[load_format]
    whole = dict(checkpoint.tensors())
    parts = dict(checkpoint.tensors(split=split))
    assert list(parts) == [name for name in whole if split.holds(name)]
    for name, part in parts.items():
        expected = whole[name][split.index(name, checkpoint.config)]
        assert part.dtype == expected.dtype and torch.equal(part, expected), name


@pytest.mark.parametrize("load_format", ["gguf", "4 bits", "bfloat16"])
@given(split=SPLITS)
@settings(max_examples=12)
def test_a_packed_part_is_that_of_the_dequantized_whole(
    checkpoints: dict[str, Checkpoint], load_format: str, split: Split
) -> None:
    """Rows of q and k in order. Four ranks cut the 96 columns of o_proj inside a group of 32: that part is plain."""
    checkpoint = checkpoints[load_format]
    plain = dict(checkpoint.tensors(split=split))
    packed = dict(checkpoint.packed_tensors(split=split))
    assert list(packed) == list(plain)
    kept = set()
    for name, part in packed.items():
        if isinstance(part, QuantizedMatrix):
            kept.add(name.rsplit(".", 2)[-2])
            part = part.dequantize()
        assert part.dtype == plain[name].dtype and torch.equal(part, plain[name]), name
    halves = {"o_proj"} if split.size in (1, 3) else set()
    everything = {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} | halves
    assert kept == (set() if load_format == "bfloat16" else everything)


@given(data=st.data())
@settings(max_examples=30)
def test_any_part_of_a_gguf_tensor(checkpoints: dict[str, Checkpoint], data: st.DataObject) -> None:
    file: Any = checkpoints["gguf"].weights
    name = data.draw(st.sampled_from(["blk.0.attn_q.weight", "blk.0.attn_norm.weight", "token_embd.weight"]))
    whole = file.file.dequantize(name)
    index = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in whole.shape
    )[: data.draw(st.integers(0, whole.ndim))]
    np.testing.assert_array_equal(file.file.dequantize(name, index), whole[index])


def test_a_rank_decodes_only_its_rows(checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    decoded = []
    original = gguf.quants.dequantize

    def dequantize(data: np.ndarray, kind: Any) -> np.ndarray:
        decoded.append(len(data))
        return original(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", dequantize)
    checkpoints["gguf"].weights.read("model.layers.0.mlp.up_proj.weight", (slice(33, 66),))
    assert sum(decoded) == 33


@pytest.mark.real
def test_the_built_in_model_is_refused_at_two() -> None:
    with pytest.raises(ConfigError, match="size is 2, but 9 query heads, 3 key-value heads and 1536"):
        Split(0, 2).check(opened(Path(builtin_model())).config)


def test_one_rank_has_it_all() -> None:
    WHOLE.check(msgspec.structs.replace(CONFIG, num_heads=7, num_kv_heads=7, intermediate_size=13))
    assert WHOLE.config(CONFIG) is CONFIG and WHOLE.vocab_rows(CONFIG) == 50 and WHOLE.first_id(CONFIG) == 0
    assert all(WHOLE.holds(name) and WHOLE.index(name, CONFIG) == () for name in tensor_shapes(CONFIG))
