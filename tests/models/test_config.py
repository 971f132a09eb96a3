"""ModelConfig and RopeConfig: both spellings, every refusal, and RoPE's frequencies."""

import math

import pytest

from tests.tiny import Tiny, llama3_factors
from trunkline.errors import ModelError
from trunkline.models.config import ModelConfig
from trunkline.models.rope import GGUFFactors, RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(**overrides):
    """A config.json of Llama 3.2's kind; an override of `...` removes the key."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in (config | overrides).items() if value is not ...}


def gguf(**overrides):
    """The same as GGUF metadata; in override names, `__` stands for a dot."""
    metadata = {
        "general.architecture": "llama",
        "llama.vocab_size": 1000,
        "llama.context_length": 4096,
        "llama.embedding_length": 64,
        "llama.block_count": 3,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    return {key: value for key, value in metadata.items() if value is not ...}


def test_hf_config_is_read_field_by_field():
    assert ModelConfig.from_hf(hf()) == ModelConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_gguf_metadata_gives_the_same_config():
    from_gguf = ModelConfig.from_gguf(gguf(), ["output.weight"], dtype="bfloat16")
    assert from_gguf == ModelConfig.from_hf(hf())


def test_optional_hf_keys_mean_what_transformers_takes_them_for():
    config = ModelConfig.from_hf(
        hf(num_key_value_heads=..., rms_norm_eps=..., bos_token_id=None, eos_token_id=..., torch_dtype=...)
    )
    assert (config.num_kv_heads, config.rms_norm_eps, config.dtype) == (8, 1e-6, "float32")
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert not config.tie_word_embeddings and not config.qkv_bias and not config.output_bias and not config.mlp_bias


def test_stored_dtype_stands_in_for_a_missing_one_only():
    assert ModelConfig.from_hf(hf(torch_dtype=...), stored_dtype="float16").dtype == "float16"
    assert ModelConfig.from_hf(hf(torch_dtype=..., dtype="bfloat16"), stored_dtype="float16").dtype == "bfloat16"


def test_head_dim_may_differ_from_hidden_size_per_head():
    assert ModelConfig.from_hf(hf(head_dim=32)).head_dim == 32
    assert ModelConfig.from_hf(hf(head_dim=None)).head_dim == 8
    metadata = gguf(llama__attention__key_length=32, llama__attention__value_length=32, llama__rope__dimension_count=32)
    assert ModelConfig.from_gguf(metadata, []).head_dim == 32


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [128001, 128009]}, {"eos_token_id": 128008}, (128001, 128009, 128008)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids_of_both_files_are_joined(config, generation, expected):
    assert ModelConfig.from_hf(hf(vocab_size=200_000, **config), generation).eos_token_ids == expected


def test_gguf_eos_ids_include_end_of_turn_and_end_of_message():
    metadata = gguf(tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=2)
    assert ModelConfig.from_gguf(metadata, []).eos_token_ids == (2, 9)


def test_gguf_tensor_names_tell_ties_and_biases():
    config = ModelConfig.from_gguf(gguf(), ["token_embd.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias"])
    assert config.tie_word_embeddings and config.qkv_bias and config.mlp_bias and not config.output_bias
    config = ModelConfig.from_gguf(gguf(), ["token_embd.weight", "output.weight"])
    assert not config.tie_word_embeddings and not config.qkv_bias and not config.output_bias and not config.mlp_bias


def test_gguf_vocabulary_is_counted_when_no_key_says_its_size():
    metadata = gguf(llama__vocab_size=..., tokenizer__ggml__tokens=["a"] * 77)
    assert ModelConfig.from_gguf(metadata, []).vocab_size == 77


@pytest.mark.parametrize(
    "overrides, rope",
    [
        ({}, RopeConfig()),
        ({"rope_theta": 500000.0}, RopeConfig(theta=500000.0)),
        ({"rope_theta": 500000, "rope_scaling": None}, RopeConfig(theta=500000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(kind="linear", factor=2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig()),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}},
            RopeConfig(theta=3e4, kind="linear", factor=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig(theta=5e5, kind="llama3", factor=8.0)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, RopeConfig(theta=5e5, kind="llama3", factor=8.0)),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}},
            RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=4096),
        ),
    ],
)
def test_hf_rope_old_and_new_spelling(overrides, rope):
    assert ModelConfig.from_hf(hf(**overrides)).rope == rope


@pytest.mark.parametrize(
    "overrides, factors, rope",
    [
        ({}, (), RopeConfig()),
        ({"llama__rope__freq_base": 1e5}, (), RopeConfig(theta=1e5)),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0}, (), RopeConfig()),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            (),
            RopeConfig(kind="linear", factor=4.0),
        ),
        ({"llama__rope__scale_linear": 4.0}, (), RopeConfig(kind="linear", factor=4.0)),
        ({}, (1.0, 1.0, 2.0, 8.0), RopeConfig(kind="factors", factors=(1.0, 1.0, 2.0, 8.0))),
        (
            {"llama__rope__scaling__factor": 2.0},
            (1.0, 1.0, 2.0, 8.0),
            RopeConfig(kind="factors", factors=(2.0, 2.0, 4.0, 16.0)),
        ),
    ],
)
def test_gguf_rope(overrides, factors, rope):
    assert ModelConfig.from_gguf(gguf(**overrides), [], rope_factors=GGUFFactors(every=factors)).rope == rope


def test_frequencies_without_scaling():
    assert RopeConfig(theta=10000.0).inverse_frequencies(8) == pytest.approx((1.0, 0.1, 0.01, 0.001))


def test_linear_scaling_divides_every_frequency():
    assert RopeConfig(kind="linear", factor=4.0).inverse_frequencies(8) == pytest.approx((0.25, 0.025, 0.0025, 0.00025))


def test_llama3_scaling_keeps_fast_frequencies_divides_slow_ones_and_blends_between():
    rope = RopeConfig(theta=500000.0, kind="llama3", factor=8.0)
    plain = RopeConfig(theta=500000.0).inverse_frequencies(128)
    shares = [scaled / original for scaled, original in zip(rope.inverse_frequencies(128), plain, strict=True)]
    assert shares == sorted(shares, reverse=True)
    for share, frequency in zip(shares, plain, strict=True):
        turns = 8192 * frequency / (2 * math.pi)
        if turns > 4:
            assert share == 1
        elif turns < 1:
            assert share == 1 / 8
        else:
            assert 1 / 8 < share < 1


def test_factors_stored_in_gguf_give_llama3_frequencies():
    tiny = Tiny(rope_scaling={**LLAMA3, "original_max_position_embeddings": 64}, hidden_size=128)
    stored = RopeConfig(kind="factors", factors=tuple(llama3_factors(tiny).tolist()))
    named = RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=64)
    assert stored.inverse_frequencies(32) == pytest.approx(named.inverse_frequencies(32), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.5}, LLAMA3])
def test_frequencies_equal_those_of_transformers(scaling):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    keys = hf(rope_theta=500000.0, rope_scaling=scaling, head_dim=64)
    expected = LlamaRotaryEmbedding(LlamaConfig(**dict(keys))).inv_freq
    ours = ModelConfig.from_hf(keys).rope.inverse_frequencies(64)
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.5}, LLAMA3])
def test_what_transformers_saves_is_read_back(scaling):
    from transformers import LlamaConfig

    keys = hf(rope_theta=500000.0, rope_scaling=scaling)
    saved = LlamaConfig(**dict(keys)).to_dict()
    assert "rope_parameters" in saved
    assert ModelConfig.from_hf(saved | {"architectures": ["LlamaForCausalLM"]}) == ModelConfig.from_hf(keys)


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "the architecture is 'GPT2LMHeadModel'; supported is LlamaForCausalLM",
        ),
        ({"architectures": ["GraniteForCausalLM"]}, "GraniteForCausalLM.*LlamaForCausalLM.*and llama.*.GGUF."),
        ({"architectures": ..., "model_type": "gpt2"}, "the architecture is 'gpt2'"),
        ({"architectures": ..., "model_type": ...}, "'architectures' is missing; supported is"),
        ({"architectures": "LlamaForCausalLM"}, "the architecture is 'LlamaForCausalLM'"),
        ({"sliding_window": 4096}, "'sliding_window' is 4096"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; allowed is 'silu'"),
        ({"vocab_size": ...}, "'vocab_size' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"max_position_embeddings": ...}, "'max_position_embeddings' is missing"),
        ({"num_hidden_layers": "3"}, "'num_hidden_layers' is '3'; allowed is an integer from 1 to 1024"),
        ({"num_hidden_layers": 3.0}, "'num_hidden_layers' is 3.0"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is true"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000"),
        ({"vocab_size": 0}, "'vocab_size' is 0; allowed is an integer from 1"),
        ({"intermediate_size": -1}, "'intermediate_size' is -1"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ({"num_attention_heads": 7}, "the hidden size is 64 and the number of heads 7; without 'head_dim'"),
        ({"num_key_value_heads": 3}, "8 query heads and 3 key-value heads"),
        ({"num_key_value_heads": 16}, "8 query heads and 16 key-value heads"),
        ({"head_dim": 7}, "head size is 7, .* only even sizes"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0; allowed is a number greater than 0 and at most 1"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' is nan"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5'"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1; allowed is true or false"),
        ({"torch_dtype": "float64"}, "'torch_dtype' is 'float64'; allowed is 'float32'"),
        ({"dtype": "int8"}, "'dtype' is 'int8'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'; allowed is a token id"),
        ({"eos_token_id": [2, -1]}, "'eos_token_id' is .2, -1."),
        ({"eos_token_id": 1000}, "end-of-text id is 1000, but the vocabulary has 1000"),
        ({"bos_token_id": 5000}, "id is 5000"),
        ({"rope_theta": 0}, "'rope_theta' is 0"),
        ({"rope_theta": math.inf}, "'rope_theta' is inf"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear'; allowed is an object"),
        (
            {"rope_scaling": {"type": "xpos", "factor": 4}},
            "rope_scaling: 'type' is 'xpos'; allowed is 'default', 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: 'factor' is missing"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "'high_freq_factor' is 1.0; allowed .* greater than 'low_freq",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is 0.5"),
    ],
)
def test_hf_refusals_name_the_key_and_the_value(overrides, sentence):
    with pytest.raises(ModelError, match=sentence):
        ModelConfig.from_hf(hf(**overrides))


def test_generation_config_is_checked_too():
    with pytest.raises(ModelError, match=r"generation_config\.json: 'eos_token_id' is 'x'"):
        ModelConfig.from_hf(hf(), {"eos_token_id": "x"})


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (
            {"general__architecture": "gpt2"},
            "the architecture is 'gpt2'; supported is LlamaForCausalLM.* .Hugging Face. and llama, qwen2.* .GGUF.",
        ),
        ({"general__architecture": ...}, "'general.architecture' is missing"),
        ({"llama__expert_count": 8}, "expert_count' is 8, a mixture of experts"),
        ({"llama__attention__sliding_window": 4096}, "sliding_window' is 4096"),
        ({"llama__attention__causal": False}, "causal' is false"),
        ({"split__count": 3}, "'split.count' is 3; allowed is 1"),
        ({"llama__block_count": ...}, "'llama.block_count' is missing"),
        ({"llama__vocab_size": ...}, "'llama.vocab_size' is missing"),
        ({"llama__attention__head_count": [8, 8, 8]}, "head_count' is .8, 8, 8.; allowed is an integer"),
        ({"llama__attention__head_count": 7}, "without 'llama.attention.key_length'"),
        ({"llama__attention__head_count_kv": 0}, "head_count_kv' is 0"),
        ({"llama__attention__value_length": 16}, "value_length' is 16; allowed is the head size of the keys, 8"),
        ({"llama__rope__dimension_count": 4}, "dimension_count' is 4"),
        ({"llama__rope__scaling__type": "longrope"}, "type' is 'longrope'; allowed is 'none', 'linear' or 'yarn'"),
        ({"tokenizer__ggml__eos_token_id": 1000}, "id is 1000, but the vocabulary has 1000"),
    ],
)
def test_gguf_refusals_name_the_key_and_the_value(overrides, sentence):
    with pytest.raises(ModelError, match=sentence):
        ModelConfig.from_gguf(gguf(**overrides), [])


@pytest.mark.parametrize("factors, sentence", [((1.0, 2.0), "2 RoPE factors"), ((1.0, 0.0, 1.0, 1.0), "holds 0.0")])
def test_rope_factors_must_fit_the_heads(factors, sentence):
    with pytest.raises(ModelError, match=sentence):
        ModelConfig.from_gguf(gguf(), [], rope_factors=GGUFFactors(every=factors))


def test_long_values_are_shortened_in_messages():
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(hf(hidden_size="x" * 10_000))
    assert len(str(caught.value)) < 200
