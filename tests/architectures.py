"""A tiny random model of each architecture, as transformers saves it, and what transformers makes of it.

folder = save_tiny("gemma3", tmp_path)                 # config.json, model.safetensors and the tokenizer of tests.tiny
folder = save_tiny("phi3", tmp_path, **LONGROPE)       # any key of config.json can be overridden
model = theirs(folder)                                 # in float32
file = save_gguf("gemma3", folder, tmp_path / "tiny.gguf")
"""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from tests.tiny import BOS, EOS, TOKEN_IDS, VOCAB_SIZE, Tiny, add_gguf_tokenizer, interleave, tiny_model
from trunkline.models.architectures import ARCHITECTURES

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": TOKEN_IDS[BOS],
    "eos_token_id": TOKEN_IDS[EOS],
    "pad_token_id": 0,
}
WINDOW = 16  # tokens: less than every prompt
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 5, "sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3": {"head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 2},
}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
}


def save_tiny(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Random weights, large enough that layers rather than the last token decide; norms are near 1, never 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        prefix = CLASSES[architecture]
        config_class = getattr(transformers, f"{prefix}TextConfig" if architecture == "gemma3" else f"{prefix}Config")
        config = config_class(**COMMON | CONFIGS[architecture] | overrides)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(weight + drawn if name.endswith("norm.weight") else drawn)
    tiny_model(folder)
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path) -> Any:
    """The same model as transformers reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def save_gguf(architecture: str, folder: Path, file: Path) -> Path:
    """The model of `save_tiny` in `folder` as llama.cpp's converter writes it: its names, its order of rows, its 1 in Gemma's norms."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[architecture].gguf)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretched = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretched) / math.log(original)))
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    add_gguf_tokenizer(writer, Tiny(), "gpt-2")
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[ARCHITECTURES[architecture].gguf.upper()], config["num_hidden_layers"]
    )
    for name, values in _experts_stacked(load_file(folder / "model.safetensors")).items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if architecture in ("llama", "smollm3"):
            for module, count in (("q_proj", heads), ("k_proj", kv_heads)):
                values = interleave(values, count) if f".{module}." in name else values
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _experts_stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices of the experts of a layer one behind the other, [experts, out, in], as the converter has them."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    others = {}
    for name, values in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        else:
            others[name] = values
    return others | {name: np.stack([of[number] for number in sorted(of)]) for name, of in stacks.items()}
