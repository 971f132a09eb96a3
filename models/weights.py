"""Which tensors a model consists of: their names, shapes, and where files keep them.

    tensor_shapes(config)["model.layers.0.self_attn.q_proj.weight"]           # (576, 576), [out, in]
    gguf_place("model.layers.0.self_attn.q_proj.weight", config)              # Place("blk.0.attn_q.weight")
    hf_place("model.layers.0.mlp.up_proj.weight", phi3)                       # the second half of "….mlp.gate_up_proj.weight"

Names are those that Hugging Face has for a Llama, everywhere outside this file. Knows no files and no torch.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from trunkline.models.architectures import ARCHITECTURES
from trunkline.models.config import ModelConfig
from trunkline.models.rope import GGUF_FACTORS

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]  # which part of a tensor, one slice for each of its first dimensions; (): all of it

_GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# With norms behind attention and MLP: this one is of what is added, not of what the MLP reads.
_NORMED_BEHIND = {"post_attention_layernorm": "post_attention_norm"}
_MIXTRAL_MODULES = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_LAYERS = "model.layers."


class Place(NamedTuple):
    """Where a file keeps a tensor.

    name  of the file's tensor
    rows  of that which are ours; None: it is ours altogether
    """

    name: str
    rows: slice | None = None

    def index_of(self, part: Index) -> Index:
        """Where in the file's tensor the part of ours lies that is at `part`."""
        if self.rows is None:
            return part
        of_rows, *others = part or (slice(None),)
        first, last, _ = of_rows.indices(self.rows.stop - self.rows.start)
        return (slice(self.rows.start + first, self.rows.start + last), *others)


Placing = Callable[[str, ModelConfig], Place]


@lru_cache(maxsize=8)
def tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Every tensor of a model by name, in the order the forward pass meets them. Experts make that tens of thousands: made once."""
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    mlp, expert = (
        {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for inner in (config.intermediate_size, config.expert_size)
    )
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"{_LAYERS}{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        _add_linears(shapes, prefix + "self_attn.", qkv, config.qkv_bias)
        if config.qk_norm:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        _add_linears(shapes, prefix + "self_attn.", {"o_proj": (hidden, queries)}, config.output_bias)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.post_norms:
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (hidden,)
        if config.is_mixture(layer):
            shapes[prefix + "mlp.gate.weight"] = (config.num_experts, hidden)
            for number in range(config.num_experts):
                _add_linears(shapes, f"{prefix}mlp.experts.{number}.", expert, False)
        else:
            _add_linears(shapes, prefix + "mlp.", mlp, config.mlp_bias)
        if config.post_norms:
            shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _add_linears(shapes: dict[str, Shape], prefix: str, linears: Mapping[str, Shape], bias: bool) -> None:
    for name, shape in linears.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]


def hf_place(name: str, config: ModelConfig) -> Place:
    """Where a Hugging Face folder keeps the tensor `name`: Phi-3 stacks q, k and v, and gate and up; Mixtral has names of its own."""
    if config.architecture == "mixtral" and ".mlp." in name:
        for ours, theirs in _MIXTRAL_MODULES.items():
            name = name.replace(ours, theirs)
    if config.architecture != "phi3":
        return Place(name)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, mlp = (queries, keys, keys), (config.intermediate_size,) * 2
    for stack, modules, sizes in (
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), mlp),
    ):
        for module, last, size in zip(modules, accumulate(sizes), sizes, strict=True):
            if name.endswith(f".{module}.weight"):
                return Place(name.replace(module, stack), slice(last - size, last))
    return Place(name)


def gguf_place(name: str, config: ModelConfig) -> Place:
    """Where a GGUF file keeps the tensor `name`: stacked where Hugging Face stacks it, under names of its own."""
    if expert := _EXPERTS.fullmatch(name):
        height = config.hidden_size if expert[3] == "down" else config.expert_size
        first = int(expert[2]) * height  # one lies behind the other
        return Place(f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight", slice(first, first + height))
    stored, rows = hf_place(name, config)
    modules = _GGUF_MODULES | (_NORMED_BEHIND if config.post_norms else {})
    module, kind = stored.rsplit(".", 1)
    if not module.startswith(_LAYERS):
        return Place(f"{modules[module]}.{kind}")
    layer, module = module.removeprefix(_LAYERS).split(".", 1)
    return Place(f"blk.{layer}.{modules[module]}.{kind}", rows)


@lru_cache(maxsize=8)
def stored_shapes(config: ModelConfig, place: Placing) -> Mapping[str, Shape]:
    """Every tensor of a file, by the file's own names."""
    stored: dict[str, Shape] = {}
    for name, shape in tensor_shapes(config).items():
        where, rows = place(name, config)
        # The last of a stack ends where the stack does.
        stored[where] = shape if rows is None else (rows.stop, *shape[1:])
    return stored


def is_redundant(name: str, config: ModelConfig) -> bool:
    """True for tensors (by either name) that checkpoints carry although the config says it all: RoPE tables, and an
    output layer that is tied to the embedding."""
    return (
        name.endswith("rotary_emb.inv_freq")
        or name in GGUF_FACTORS.values()
        or (name == "lm_head.weight" and config.tie_word_embeddings)
    )


def is_interleaved(name: str, config: ModelConfig) -> bool:
    """True for weights and biases of q and k whose rows GGUF files keep in another order, see `unpermute`."""
    return ARCHITECTURES[config.architecture].interleaved and (".q_proj." in name or ".k_proj." in name)


def unpermute(values: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Rows of q or k, or of some of their heads, from GGUF's order into Hugging Face's: [num_heads * head_dim, …] in and out, contiguous.

    RoPE turns pairs of rows of a head. In some GGUF files, Llama's among them, the two rows of pair i are neighbours, 2i and 2i+1; in
    Hugging Face's order they are i and i + head_dim/2.
    """
    import numpy as np

    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # head, pair, which of the two, in
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
