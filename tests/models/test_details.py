"""What only one architecture's files say: defaults, patterns of layers, and refusals in a sentence."""

from pathlib import Path
from typing import Any

import gguf as gguf_library
import pytest

from tests.tiny import tiny_gguf
from trunkline.config import ModelSource
from trunkline.errors import ModelError
from trunkline.models.architectures import ARCHITECTURES
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.config import ModelConfig
from trunkline.models.rope import NOT_TURNED, GGUFFactors, RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def hf(architecture: str, **changes: Any) -> ModelConfig:
    """An override of `...` removes the key."""
    config = {"architectures": [ARCHITECTURES[architecture].hf]} | SIZES | changes
    return ModelConfig.from_hf({key: value for key, value in config.items() if value is not ...})


def gguf(architecture: str, factors: GGUFFactors | None = None, **changes: Any) -> ModelConfig:
    """In names of overrides, `__` stands for a dot."""
    prefix = ARCHITECTURES[architecture].gguf
    own = {
        "vocab_size": 1000,
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": 8,
        "feed_forward_length": 256,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    metadata = {"general.architecture": prefix} | {f"{prefix}.{name}": value for name, value in own.items()}
    return ModelConfig.from_gguf(metadata, [], rope_factors=factors or GGUFFactors())


def test_a_config_without_a_list_of_architectures_is_told_by_its_type() -> None:
    for name, architecture in ARCHITECTURES.items():
        assert hf(name, architectures=..., model_type=architecture.model_type).architecture == name


def test_numbers_that_a_config_leaves_out_are_those_of_its_architecture() -> None:
    assert hf("phi3").rms_norm_eps == hf("mixtral").rms_norm_eps == 1e-5
    assert hf("mixtral").rope.theta == 1e6


def test_windows_follow_the_pattern_of_the_architecture() -> None:
    w = 7
    assert hf("mistral", sliding_window=w).windows == (w,) * 8
    assert hf("mistral", sliding_window=None).windows == ()
    assert hf("mistral").windows == (4096,) * 8, "as transformers has it"
    assert hf("qwen2", sliding_window=w).windows == (), "it is not switched on"
    assert hf("qwen2", sliding_window=w, use_sliding_window=True, max_window_layers=6).windows == (0,) * 6 + (w, w)
    assert hf("gemma2", sliding_window=w).windows == (w, 0) * 4
    assert gguf("gemma2").windows == (4096, 0) * 4, "as llama.cpp has it for files that do not say"
    assert hf("gemma3", sliding_window=w).windows == (w, w, w, w, w, 0, w, w)
    assert hf("gemma3", sliding_window=w, sliding_window_pattern=2).windows == (w, 0) * 4
    kinds = ["full_attention", "sliding_attention"] * 4
    assert hf("gemma3", sliding_window=w, layer_types=kinds).windows == (0, w) * 4
    assert gguf("gemma2", attention__sliding_window=w).windows == (w, 0) * 4
    assert gguf("gemma3", attention__sliding_window=w).windows == (w, w, w, w, w, 0, w, w)
    assert gguf("phi3", attention__sliding_window=w).windows == (w,) * 8


def test_each_layer_has_its_own_rope() -> None:
    gemma = hf("gemma3", sliding_window=7, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert gemma.rope_of(0) == RopeConfig(theta=1e4), "a window"
    assert gemma.rope_of(5) == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    nested = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 3e3}}
    gemma = hf("gemma3", sliding_window=7, rope_parameters=nested)
    assert (gemma.rope_of(0).theta, gemma.rope_of(5).theta) == (3e3, 5e5)
    smollm = hf("smollm3")
    assert [smollm.rope_of(layer) is NOT_TURNED for layer in range(8)] == [False, False, False, True] * 2
    assert smollm.rope.theta == 2e6
    assert hf("smollm3", no_rope_layers=[0, 1] * 4).unrotated_layers == (0, 2, 4, 6)
    assert gguf("smollm3").unrotated_layers == (3, 7)
    assert set(NOT_TURNED.inverse_frequencies(8)) == {0.0}


def test_gemmas_scores_are_scaled_by_a_number_of_their_own() -> None:
    assert hf("gemma2").attention_scale == 256**-0.5 and hf("gemma2").head_dim == 256
    assert hf("gemma2", query_pre_attn_scalar=144).attention_scale == 144**-0.5
    assert hf("llama").attention_scale == 8**-0.5
    assert gguf("gemma2").attention_scale == 16**-0.5
    assert gguf("gemma2", block_count=46).attention_scale == 8**-0.5, "the 27B: hidden size by heads"
    assert gguf("gemma3", block_count=62).attention_scale == 8**-0.5
    assert (hf("gemma2").attention_soft_cap, hf("gemma2").logit_soft_cap) == (50.0, 30.0)
    assert (hf("gemma3").attention_soft_cap, hf("gemma3").logit_soft_cap) == (0.0, 0.0)
    assert (hf("gemma3").norm_offset, gguf("gemma3").norm_offset) == (1.0, 0.0), "files have it added"
    assert hf("gemma2").embedding_scale == gguf("gemma2").embedding_scale == 8.0


def test_experts() -> None:
    config = hf("qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0])
    assert (config.num_experts, config.experts_per_token, config.expert_size, config.normalize_experts) == (
        6,
        2,
        24,
        False,
    )
    assert [config.is_mixture(layer) for layer in range(3)] == [False, True, True]
    assert hf("qwen3_moe", decoder_sparse_step=2).dense_layers == (0, 2, 4, 6)
    config = hf("mixtral")
    assert (config.num_experts, config.experts_per_token, config.expert_size, config.normalize_experts) == (
        8,
        2,
        256,
        True,
    )
    assert not hf("llama").is_mixture(0)


def test_the_length_that_is_served_decides_between_short_and_long_factors() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = hf("phi3", rope_scaling=scaling, original_max_position_embeddings=1024)
    assert config.at_length(1024).rope.factors == (1.0,) * 4
    assert config.at_length(1025).rope.factors == (2.0,) * 4
    assert config.rope.attention_factor == pytest.approx(1.2**0.5), "1 + ln 4 / ln 1024"
    assert config.at_length(1024).rope.kind == "factors"
    old_name = hf("phi3", rope_scaling=scaling | {"rope_type": "su"}, original_max_position_embeddings=1024)
    assert old_name == config


def test_dynamic_ropes_base_grows_with_the_length_that_is_served() -> None:
    config = hf("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert config.max_position_embeddings == 8192
    assert config.at_length(4096).rope == RopeConfig()
    assert config.at_length(8192).rope.theta == pytest.approx(1e4 * 3 ** (8 / 6))


def test_yarn_makes_the_longest_context_longer() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert hf("qwen2", rope_scaling=yarn).max_position_embeddings == 8192
    assert hf("qwen2", rope_scaling=yarn, max_position_embeddings=32768).max_position_embeddings == 32768
    assert hf("qwen2", rope_scaling=yarn).rope.attention_factor == pytest.approx(1.1386294)
    config = gguf(
        "qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=2048
    )
    assert config.rope == hf("qwen2", rope_scaling=yarn).rope


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"sliding_window": 512}, "'sliding_window' is 512; a Llama sees the whole context, and allowed is null"),
    ("mistral", {"sliding_window": 0}, "'sliding_window' is 0; allowed is an integer from 1"),
    ("gemma3", {"layer_types": ["full_attention"]}, "'layer_types' is .*; allowed is a list of 8, each 'sliding_attention' or"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 8}, "'layer_types' is"),
    ("gemma3", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is true; allowed is false"),
    ("gemma2", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'; allowed is 'gelu_pytorch_tanh'"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0"),
    ("gemma2", {"layer_types": [{}] * 8}, "'layer_types' is"),
    ("qwen2", {"hidden_act": ["silu"]}, "'hidden_act' is .'silu'.|'hidden_act' is ..silu"),
    ("qwen2", {"rope_theta": 1}, "'rope_theta' is 1; allowed is a number greater than 1"),
    ("gemma3", {"rope_local_base_freq": 5e-324}, "'rope_local_base_freq' is 5e-324"),
    ("qwen2", {"rope_scaling": {"type": "linear", "factor": 1e-320}}, "'factor' is 1e-320"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 1e-320}}, "'beta_slow' is 1e-320"),
    ("qwen2", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE turns 2 numbers of each head; allowed are at least 4"),
    ("qwen2", {"architectures": ["x" * 1000]}, r"the architecture is .*\.\.\.; supported is"),
    ("qwen2", {"hidden_act": "relu"}, "'hidden_act' is 'relu'; allowed is 'silu' or 'swish'"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "'no_rope_layers' is .1, 1.; allowed is a list of 8"),
    ("qwen3_moe", {"num_experts": 4}, "Each token goes to 8 of 4 experts; allowed are 1 to 4"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, "'mlp_only_layers' is '0'; allowed is a list of numbers of layers"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; allowed is 1"),
    ("phi3", {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "'long_factor' is missing"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 RoPE factors"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}}, "'short_factor' is 1.0; allowed is a list"),
    ("qwen2", {"rope_scaling": {"type": "yarn"}}, "'factor' is missing"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}}, "'beta_fast' is 1; allowed is .* 'beta_slow'"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes", "sentence"), REFUSALS)
def test_refusals_name_the_key_and_the_value(architecture: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        hf(architecture, **changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("qwen3", {"attention__sliding_window": 512}, "sliding_window' is 512, sliding-window attention"),
        ("qwen3", {"expert_count": 8}, "expert_count' is 8, a mixture of experts"),
        ("qwen3", {"rope__dimension_count": 8}, "dimension_count' is 8; allowed is the head size"),
        ("phi3", {"rope__dimension_count": 32}, "dimension_count' is 32"),
        ("phi3", {"rope__scaling__type": "longrope"}, "type' is 'longrope'; allowed is .* with its factors as tensors"),
    ],
)
def test_refusals_of_gguf(architecture: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        gguf(architecture, **changes)


def test_factors_that_are_no_numbers_to_divide_by() -> None:
    with pytest.raises(ModelError, match=r"'rope_factors_long\.weight' holds 0\.0"):
        gguf("phi3", GGUFFactors(short=(1.0,) * 8, long=(0.0,) * 8))


def test_only_experts_may_have_three_dimensions_in_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf_library.GGUFWriter.add_tensor

    def add_deep(writer: Any, name: str, values: Any, **options: Any) -> None:
        add(
            writer,
            name,
            values.reshape(2, -1, values.shape[-1]) if name == "blk.0.ffn_up.weight" else values,
            **options,
        )

    monkeypatch.setattr(gguf_library.GGUFWriter, "add_tensor", add_deep)
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' has the shape \[2, 64, 64\]"):
        open_checkpoint(ModelSource(path=str(tiny_gguf(tmp_path / "tiny.gguf"))))
