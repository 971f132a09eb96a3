"""What sets one architecture apart from another: names, what its files leave out, and what they say in words of their own.

    architecture = ARCHITECTURES["gemma3"]
    architecture.hf                                    # "Gemma3ForCausalLM", in config.json
    architecture.from_hf(fields, num_layers)           # {"post_norms": True, "windows": (512, 512, …, 0), …}: fields of ModelConfig

What they have in common is read in config.py, how their tensors are called in weights.py, and registry.py says which block runs them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trunkline.errors import ModelError, shown
from trunkline.models.fields import MAX_TOKENS, MAX_WIDTH, Fields
from trunkline.models.rope import MAX_THETA, MIN_THETA, RopeConfig, rope_from_hf

Details = dict[str, Any]  # fields of ModelConfig that not all architectures set

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
SILU = {"silu": "silu", "swish": "silu"}  # spellings -> kernels.interface.Activation
GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}
SOFT_CAPS = {
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}  # ours -> theirs
MAX_SCALE = 1e9
MAX_EXPERTS = 1024


def _plain(fields: Fields, num_layers: int) -> Details:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture in both spellings.

    hf          in `architectures` of config.json
    bare        the same without an output layer: what embedding models are published as
    model_type  in config.json, when `architectures` is missing
    gguf        in `general.architecture`; "": files of it go by another's name
    defaults    of config.json's keys, where transformers has them
    from_hf     what only config.json of this architecture says
    from_gguf   the same of a GGUF file
    partial     RoPE may turn a part of each head
    interleaved rows of q and k in GGUF files: the two rows of a pair that RoPE turns are neighbours
    """

    hf: str
    bare: str
    model_type: str
    gguf: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    from_hf: Callable[[Fields, int], Details] = _plain
    from_gguf: Callable[[Fields, int], Details] = _plain
    partial: bool = False
    interleaved: bool = False


def windows_of_hf(fields: Fields, num_layers: int, is_windowed: Callable[[int], bool]) -> tuple[int, ...]:
    """For each layer the newest tokens that it sees, 0: all of them. `layer_types` says which; without it, `is_windowed`."""
    if fields.get("sliding_window") is None:
        return ()
    window = fields.integer("sliding_window", 1, MAX_TOKENS)
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(window if is_windowed(layer) else 0 for layer in range(num_layers))
    allowed = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in tuple(allowed) for kind in kinds):
        raise fields.refuse("layer_types", f"a list of {num_layers}, each 'sliding_attention' or 'full_attention'")
    return tuple(allowed[kind] for kind in kinds)


def _activation(fields: Fields, key: str, spellings: Mapping[str, str]) -> str:
    seen = fields.get(key) or next(iter(spellings))
    if seen not in tuple(spellings):  # which a list can be looked for in, too
        raise fields.refuse(key, " or ".join(map(repr, spellings)))
    return spellings[seen]


def _attention_biases(fields: Fields) -> Details:
    """One switch for all four layers."""
    has_biases = fields.boolean("attention_bias", default=False)
    return {"qkv_bias": has_biases, "output_bias": has_biases}


def _llama(fields: Fields, num_layers: int) -> Details:
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        raise ModelError(
            f"config.json: 'sliding_window' is {shown(fields.get('sliding_window'))}; a Llama sees the whole context, and allowed is null."
        )
    return {
        "activation": _activation(fields, "hidden_act", SILU),
        **_attention_biases(fields),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


def _mistral(fields: Fields, num_layers: int) -> Details:
    return {
        "activation": _activation(fields, "hidden_act", SILU),
        "windows": windows_of_hf(fields, num_layers, lambda layer: True),
    }


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not fields.boolean("use_sliding_window", default=False):
        return ()
    first = fields.integer("max_window_layers", 0, 1024)
    return windows_of_hf(fields, num_layers, lambda layer: layer >= first)


def _qwen2(fields: Fields, num_layers: int) -> Details:
    return {
        "activation": _activation(fields, "hidden_act", SILU),
        "qkv_bias": True,
        "windows": _qwen_windows(fields, num_layers),
    }


def _qwen3(fields: Fields, num_layers: int) -> Details:
    return {
        "activation": _activation(fields, "hidden_act", SILU),
        **_attention_biases(fields),
        "qk_norm": True,
        "windows": _qwen_windows(fields, num_layers),
    }


def _qwen3_moe(fields: Fields, num_layers: int) -> Details:
    # The second is how transformers 5 saves it.
    count = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    step = fields.integer("decoder_sparse_step", 1, 1024)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.refuse("mlp_only_layers", "a list of numbers of layers")
    return _qwen3(fields, num_layers) | {
        "num_experts": fields.integer(count, 1, MAX_EXPERTS),
        "experts_per_token": fields.integer("num_experts_per_tok", 1, MAX_EXPERTS),
        "expert_size": fields.integer("moe_intermediate_size", 1, MAX_WIDTH),
        "normalize_experts": fields.boolean("norm_topk_prob", default=False),
        "dense_layers": tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    }


def _mixtral(fields: Fields, num_layers: int) -> Details:
    return _mistral(fields, num_layers) | {
        "num_experts": fields.integer("num_local_experts", 1, MAX_EXPERTS),
        "experts_per_token": fields.integer("num_experts_per_tok", 1, MAX_EXPERTS),
        "expert_size": fields.integer("intermediate_size", 1, MAX_WIDTH),
        "normalize_experts": True,
    }


def _phi3(fields: Fields, num_layers: int) -> Details:
    return {
        "activation": _activation(fields, "hidden_act", SILU),
        "windows": windows_of_hf(fields, num_layers, lambda layer: True),
    }


def _smollm3(fields: Fields, num_layers: int) -> Details:
    turned = fields.get("no_rope_layers")
    if turned is None:
        interval = fields.integer("no_rope_layer_interval", 1, 1024)
        turned = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(turned, list) or len(turned) < num_layers or not all(flag in (0, 1) for flag in turned):
        raise fields.refuse("no_rope_layers", f"a list of {num_layers}, each 1 where RoPE is used, or 0")
    unrotated = tuple(layer for layer in range(num_layers) if not turned[layer])
    windows: tuple[int, ...] = ()
    if fields.boolean("use_sliding_window", default=False):
        windows = windows_of_hf(fields, num_layers, lambda layer: layer in unrotated)
    return {
        "activation": _activation(fields, "hidden_act", SILU),
        **_attention_biases(fields),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "unrotated_layers": unrotated,
        "windows": windows,
    }


def _gemma(fields: Fields) -> Details:
    """What Gemma 2 and 3 share."""
    if fields.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "false: the model must write text from left to right")
    return {
        "activation": _activation(fields, "hidden_activation", GELU_TANH),
        **_attention_biases(fields),
        "post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": fields.integer("hidden_size", 1, MAX_WIDTH) ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 0, MAX_SCALE) ** -0.5,
        **{
            ours: 0.0 if fields.get(key) is None else fields.number(key, 0, MAX_SCALE)
            for ours, key in SOFT_CAPS.items()
        },
    }


def _gemma2(fields: Fields, num_layers: int) -> Details:
    return _gemma(fields) | {"windows": windows_of_hf(fields, num_layers, lambda layer: layer % 2 == 0)}


def _gemma3(fields: Fields, num_layers: int) -> Details:
    pattern = fields.integer("sliding_window_pattern", 1, 1024)
    local = fields.section("rope_parameters").section("sliding_attention")
    theta = fields.number("rope_local_base_freq", MIN_THETA, MAX_THETA)
    return _gemma(fields) | {
        "qk_norm": True,
        "windows": windows_of_hf(fields, num_layers, lambda layer: (layer + 1) % pattern != 0),
        "local_rope": rope_from_hf(Fields("config.json", {}), local, theta=theta),
    }


def _gguf_windows(
    fields: Fields, prefix: str, num_layers: int, is_windowed: Callable[[int], bool], *, default: int = 0
) -> tuple[int, ...]:
    """`default` is the window of files that say none; 0: they have none."""
    key = f"{prefix}.attention.sliding_window"
    if not (default if fields.get(key) is None else fields.get(key)):
        return ()
    window = fields.integer(key, 1, MAX_TOKENS, default=default)
    return tuple(window if is_windowed(layer) else 0 for layer in range(num_layers))


def _gguf_gemma(fields: Fields, prefix: str, num_layers: int, largest: int) -> Details:
    """What Gemma 2 and 3 share; its norms' weights are stored with the 1 that is added to them."""
    heads = fields.integer(f"{prefix}.attention.head_count", 1, 2048)
    head_dim = fields.integer(f"{prefix}.attention.key_length", 2, 1024)
    hidden = fields.integer(f"{prefix}.embedding_length", 1, MAX_WIDTH)
    scalar = hidden / heads if num_layers == largest else head_dim  # llama.cpp knows the 27B by its layers, too
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": hidden**0.5,
        "attention_scale": scalar**-0.5,
    }


def _gguf_gemma2(fields: Fields, num_layers: int) -> Details:
    usual = {"attention_soft_cap": 50.0, "logit_soft_cap": 30.0}
    return _gguf_gemma(fields, "gemma2", num_layers, GEMMA2_27B_LAYERS) | {
        "windows": _gguf_windows(fields, "gemma2", num_layers, lambda layer: layer % 2 == 0, default=4096),
        **{ours: fields.number(f"gemma2.{key}", 0, MAX_SCALE, default=usual[ours]) for ours, key in SOFT_CAPS.items()},
    }


def _gguf_gemma3(fields: Fields, num_layers: int) -> Details:
    theta = fields.number("gemma3.rope.freq_base_swa", MIN_THETA, MAX_THETA, default=10000.0)
    return _gguf_gemma(fields, "gemma3", num_layers, GEMMA3_27B_LAYERS) | {
        "windows": _gguf_windows(fields, "gemma3", num_layers, lambda layer: (layer + 1) % 6 != 0),
        "local_rope": RopeConfig(theta=theta),
    }


def _gguf_qwen3_moe(fields: Fields, num_layers: int) -> Details:
    return {
        "num_experts": fields.integer("qwen3moe.expert_count", 1, MAX_EXPERTS),
        "experts_per_token": fields.integer("qwen3moe.expert_used_count", 1, MAX_EXPERTS),
        "expert_size": fields.integer("qwen3moe.expert_feed_forward_length", 1, MAX_WIDTH),
        "normalize_experts": True,  # as all of them that were published
    }


def _gguf_phi3(fields: Fields, num_layers: int) -> Details:
    return {"windows": _gguf_windows(fields, "phi3", num_layers, lambda layer: True)}


def _gguf_smollm3(fields: Fields, num_layers: int) -> Details:
    return {"unrotated_layers": tuple(range(3, num_layers, 4))}


_GEMMA = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}

ARCHITECTURES = {
    "llama": Architecture(
        hf="LlamaForCausalLM",
        bare="LlamaModel",
        model_type="llama",
        gguf="llama",
        from_hf=_llama,
        interleaved=True,
    ),
    "mistral": Architecture(
        hf="MistralForCausalLM",
        bare="MistralModel",
        model_type="mistral",
        gguf="",
        defaults={"sliding_window": 4096},
        from_hf=_mistral,
    ),
    "qwen2": Architecture(
        hf="Qwen2ForCausalLM",
        bare="Qwen2Model",
        model_type="qwen2",
        gguf="qwen2",
        defaults={"sliding_window": 4096, "max_window_layers": 28},
        from_hf=_qwen2,
    ),
    "qwen3": Architecture(
        hf="Qwen3ForCausalLM",
        bare="Qwen3Model",
        model_type="qwen3",
        gguf="qwen3",
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        from_hf=_qwen3,
    ),
    "qwen3_moe": Architecture(
        hf="Qwen3MoeForCausalLM",
        bare="Qwen3MoeModel",
        model_type="qwen3_moe",
        gguf="qwen3moe",
        defaults={
            "sliding_window": 4096,
            "max_window_layers": 28,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        from_hf=_qwen3_moe,
        from_gguf=_gguf_qwen3_moe,
    ),
    "mixtral": Architecture(
        hf="MixtralForCausalLM",
        bare="MixtralModel",
        model_type="mixtral",
        gguf="",
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        from_hf=_mixtral,
    ),
    "gemma2": Architecture(
        hf="Gemma2ForCausalLM",
        bare="Gemma2Model",
        model_type="gemma2",
        gguf="gemma2",
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        from_hf=_gemma2,
        from_gguf=_gguf_gemma2,
    ),
    "gemma3": Architecture(
        hf="Gemma3ForCausalLM",
        bare="Gemma3TextModel",
        model_type="gemma3_text",
        gguf="gemma3",
        defaults={
            **_GEMMA,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        from_hf=_gemma3,
        from_gguf=_gguf_gemma3,
    ),
    "phi3": Architecture(
        hf="Phi3ForCausalLM",
        bare="Phi3Model",
        model_type="phi3",
        gguf="phi3",
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        from_hf=_phi3,
        from_gguf=_gguf_phi3,
        partial=True,
    ),
    "smollm3": Architecture(
        hf="SmolLM3ForCausalLM",
        bare="SmolLM3Model",
        model_type="smollm3",
        gguf="smollm3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        from_hf=_smollm3,
        from_gguf=_gguf_smollm3,
        interleaved=True,
    ),
}
SUPPORTED = (
    f"{', '.join(a.hf for a in ARCHITECTURES.values())} (Hugging Face)"
    f" and {', '.join(a.gguf for a in ARCHITECTURES.values() if a.gguf)} (GGUF)"
)
