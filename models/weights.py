"""Which tensors a model consists of: their names, shapes, and what GGUF files call them.

    tensor_shapes(config)["model.layers.0.self_attn.q_proj.weight"]    # (576, 576), [out, in]
    gguf_name("model.layers.0.self_attn.q_proj.weight")                # "blk.0.attn_q.weight"

Names are Hugging Face's everywhere outside this file. Knows no files and no torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trunkline.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]

_GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYERS = "model.layers."


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a Llama by name, in the order the forward pass meets them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"{_LAYERS}{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        _add_linears(shapes, prefix + "self_attn.", attention, config.attention_bias)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        _add_linears(shapes, prefix + "mlp.", mlp, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _add_linears(shapes: dict[str, Shape], prefix: str, linears: Mapping[str, Shape], bias: bool) -> None:
    for name, shape in linears.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]


def gguf_name(name: str) -> str:
    """What a llama-type GGUF file calls the tensor `name`."""
    module, kind = name.rsplit(".", 1)
    if module.startswith(_LAYERS):
        layer, module = module.removeprefix(_LAYERS).split(".", 1)
        return f"blk.{layer}.{_GGUF_MODULES[module]}.{kind}"
    return f"{_GGUF_MODULES[module]}.{kind}"


def is_redundant(name: str, config: ModelConfig) -> bool:
    """True for tensors (by either name) that checkpoints carry although the config says it all: RoPE tables, and an
    output layer that is tied to the embedding."""
    return (
        name.endswith("rotary_emb.inv_freq")
        or name == "rope_freqs.weight"
        or (name == "lm_head.weight" and config.tie_word_embeddings)
    )


def is_rotary(name: str) -> bool:
    """True if the rows of `name` are turned by RoPE, that is q's and k's weights and biases."""
    return ".q_proj." in name or ".k_proj." in name


def unpermute(values: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Rows of q or k, or of some of their heads, from GGUF's order into Hugging Face's: [num_heads * head_dim, …] in and out, contiguous.

    RoPE turns pairs of rows of a head. In llama-type GGUF files the two rows of pair i are neighbours, 2i and 2i+1; in
    Hugging Face's order they are i and i + head_dim/2.
    """
    import numpy as np

    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # head, pair, which of the two, in
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
